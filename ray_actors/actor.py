"""The Ray class around the worker. The one module that imports Ray when it is imported; reach it through `cluster.actor_class`."""

from __future__ import annotations

import os
from typing import Any

import ray
import torch

from rlhf_scan import CreditRequest, CreditResult, RlhfScanError, __version__

from .transport import packed_result
from .worker import CreditWorker


@ray.remote
class CreditActor(CreditWorker):
    """A `CreditWorker` in a Ray actor, on its GPU if it has one.

        actor = CreditActor.options(num_gpus=1).remote()
        result = ray.get(actor.run.remote(CreditRequest("gae", {"rewards": rewards, "values": values})))

    With a GPU tensors are moved there and results back to the CPU, so that backend "auto" means triton; backend "cpu" stays on the CPU.

    Args:
        backend: as in `rlhf_scan.gae`.
        validate: as in `rlhf_scan.gae`.
    """

    def __init__(self, backend: str = "auto", validate: str = "shapes") -> None:
        super().__init__(backend, validate, "cuda" if ray.get_gpu_ids() and backend != "cpu" else "cpu")

    def run_packed(self, *requests: CreditRequest) -> list[CreditResult | RlhfScanError]:
        """`run_many` with tensors packed for transport, both ways."""
        actor = {"actor": ray.get_runtime_context().get_actor_id()}
        answers = self.run_many(requests)
        return [
            answer if isinstance(answer, RlhfScanError) else packed_result(CreditResult(answer.tensors, {**answer.report, **actor}))
            for answer in answers
        ]

    def info(self) -> dict[str, Any]:
        """What runs here, and where."""
        return {
            "actor": ray.get_runtime_context().get_actor_id(),
            "node": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "device": str(self.device),
            "backend": self.engine.backend,
            "validate": self.engine.validate,
            "threads": torch.get_num_threads(),
            "versions": {"rlhf_scan": __version__, "torch": torch.__version__, "ray": ray.__version__},
        }
