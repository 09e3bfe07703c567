"""rlhf_scan: credit assignment for RLHF and LLM post-training, as fused segmented scans."""

from .engine import Engine, LocalEngine, execute
from .errors import BackendError, EngineError, InputError, RlhfScanError
from .functional import GAE, discounted_returns, gae
from .linear import linear_scan
from .requests import CreditRequest, CreditResult
from .segments import Segments
from .version import __version__

__all__ = [
    "GAE",
    "BackendError",
    "CreditRequest",
    "CreditResult",
    "Engine",
    "EngineError",
    "InputError",
    "LocalEngine",
    "RlhfScanError",
    "Segments",
    "__version__",
    "discounted_returns",
    "execute",
    "gae",
    "linear_scan",
]
