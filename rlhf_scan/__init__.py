"""rlhf_scan: credit assignment for RLHF and LLM post-training, as fused segmented scans."""

from . import served as _served  # noqa: F401  # makes them known
from .engine import Engine, LocalEngine, execute
from .errors import BackendError, EngineError, InputError, RlhfScanError
from .forward import eligibility_traces, episodic_cumsum
from .functional import GAE, discounted_returns, gae, lambda_returns
from .groups import GroupAdvantages, expand_to_tokens, grpo, reinforce_plus_plus, rloo
from .linear import linear_scan
from .off_policy import Retrace, VTrace, retrace, retrace_from_policy, vtrace
from .ppo import PPOAdvantages, ppo_advantages
from .requests import CreditRequest, CreditResult
from .segments import Segments
from .turns import clock_rate, turn_returns
from .version import __version__
from .whitening import whiten

__all__ = [
    "GAE",
    "BackendError",
    "CreditRequest",
    "CreditResult",
    "Engine",
    "EngineError",
    "GroupAdvantages",
    "InputError",
    "LocalEngine",
    "PPOAdvantages",
    "Retrace",
    "RlhfScanError",
    "Segments",
    "VTrace",
    "__version__",
    "clock_rate",
    "discounted_returns",
    "eligibility_traces",
    "episodic_cumsum",
    "execute",
    "expand_to_tokens",
    "gae",
    "grpo",
    "lambda_returns",
    "linear_scan",
    "ppo_advantages",
    "reinforce_plus_plus",
    "retrace",
    "retrace_from_policy",
    "rloo",
    "turn_returns",
    "vtrace",
    "whiten",
]
