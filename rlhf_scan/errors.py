"""What rlhf_scan raises.

RlhfScanError
+-- InputError (also ValueError)   an argument is wrong; the message names it, what it must be, what it was, what to do
+-- BackendError                   a backend cannot run here; the message says why and what to install or choose
|   +-- FormulaError (also TypeError)  a function of an estimator is not what the backend can run; the message names both
+-- EngineError                    a remote engine (Ray, HTTP) could not do the work
"""


class RlhfScanError(Exception):
    """Base of every error that rlhf_scan raises on purpose."""


class InputError(RlhfScanError, ValueError):
    """An argument is wrong."""


class BackendError(RlhfScanError):
    """A backend cannot run here."""


class FormulaError(BackendError, TypeError):
    """A backend cannot run a function of an estimator."""


class EngineError(RlhfScanError):
    """An engine could not do the work."""
