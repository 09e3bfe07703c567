"""What is behind the Ray door and needs no Ray: the worker, how tensors travel, back-pressure."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ray_requests import BAD, REFERENCE, assert_same, bits, returns_of, reward_of

from rlhf_scan import BackendError, CreditRequest, CreditResult, EngineError, InputError
from rlhf_scan.checks import FLOATS
from rlhf_scan.ray_actors import CreditWorker
from rlhf_scan.ray_actors.budget import TokenBudget
from rlhf_scan.ray_actors.transport import PackedTensor, tensor_over

# The worker


def test_worker_answers_good_requests_beside_bad_ones() -> None:
    requests = [returns_of(0.0), *BAD.values(), returns_of(1.0), "no request", returns_of(2.0)]
    answers = CreditWorker("reference").run_many(requests)
    assert len(answers) == len(requests)
    good = [answer for answer in answers if isinstance(answer, CreditResult)]
    assert [reward_of(answer) for answer in good] == [0.0, 1.0, 2.0]
    for request, answer in zip(BAD.values(), answers[1:], strict=False):
        with pytest.raises(InputError) as alone:
            REFERENCE.run(request)
        assert isinstance(answer, InputError)
        assert str(answer) == str(alone.value)
    unforeseen = answers[-2]
    assert isinstance(unforeseen, EngineError)
    assert "AttributeError" in str(unforeseen)
    assert CreditWorker().run_many([]) == []


def test_worker_packs_good_requests_into_one_launch() -> None:
    answers = CreditWorker("reference").run_many([returns_of(float(i), 3 + i) for i in range(5)])
    assert [answer.report["shared_with"] for answer in answers if isinstance(answer, CreditResult)] == [4] * 5


def test_worker_raises_for_a_single_request() -> None:
    with pytest.raises(InputError, match=r"gae: values must have shape \[4\]"):
        CreditWorker("reference").run(BAD["shape"])


def test_worker_reads_read_only_arrays_and_says_nothing() -> None:
    arrays = {name: np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) for name in ("rewards", "values")}
    before = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CreditWorker("reference").run(CreditRequest("gae", arrays))  # type: ignore[arg-type]
    assert_same(result, REFERENCE.run(CreditRequest("gae", {name: torch.from_numpy(array) for name, array in before.items()})))
    for name, array in arrays.items():
        assert np.array_equal(array, before[name])


def test_worker_refuses_arrays_that_torch_has_not() -> None:
    with pytest.raises(InputError, match="rewards must be"):
        CreditWorker("reference").run(CreditRequest("discounted_returns", {"rewards": np.array(["a", "b"])}))  # type: ignore[dict-item]


def test_worker_checks_contents_when_asked() -> None:
    request = CreditRequest("discounted_returns", {"rewards": torch.tensor([0.0, float("nan")])})
    with pytest.raises(InputError, match="rewards must be finite"):
        CreditWorker("reference", validate="full").run(request)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_worker_without_a_gpu_says_so() -> None:
    with pytest.raises(BackendError, match="install torch with CUDA"):
        CreditWorker(device="cuda")


# Transport


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_tensors_keep_every_bit(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        whole = torch.tensor([[True, False, True], [False, False, True]])
    else:  # every bit pattern that 240 random bytes make, NaNs with payloads among them
        whole = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (5, 48), dtype=np.uint8)).view(dtype)
    for tensor in (whole, whole.T, whole[:, ::2], whole[:0], whole[0, 0], whole[:1].expand(4, -1)):
        back = PackedTensor.of(tensor).tensor()
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits(back) == bits(tensor)
    assert PackedTensor.of(whole).array.__array_interface__["data"][0] == whole.data_ptr()  # no copy


def test_a_read_only_array_is_viewed_without_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_over(array)
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    assert not array.flags.writeable


# Back-pressure


def test_budget_admits_in_order_and_one_that_is_too_large_alone() -> None:
    budget = TokenBudget(10)
    budget.acquire(8, 0)
    entered: list[int] = []

    def enter(tokens: int) -> None:
        budget.acquire(tokens, 10)
        entered.append(tokens)

    threads = []
    for tokens in (50, 1):  # the small one would fit at once, but came later
        threads.append(threading.Thread(target=enter, args=[tokens]))
        threads[-1].start()
        time.sleep(0.05)
    assert entered == []
    budget.release(8)
    threads[0].join(10)
    assert entered == [50]
    budget.release(50)
    threads[1].join(10)
    assert entered == [50, 1]
    with pytest.raises(EngineError, match="max_tokens_in_flight is 10"):
        budget.acquire(10, 0)
    budget.acquire(9, 0)  # whoever gave up waiting stands in nobody's way


def test_a_closed_budget_turns_away_those_who_wait() -> None:
    budget = TokenBudget(1)
    budget.acquire(1, 0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(budget.acquire, 1, 30)
        closing = threads.submit(budget.close)
        with pytest.raises(EngineError, match="closed"):
            waiting.result(10)
        assert not closing.done()
        budget.release(1)
        closing.result(10)
