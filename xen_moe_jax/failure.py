"""`check` and the error that it raises for operations that gave up."""

from __future__ import annotations

from xen_moe_jax.backends import failure


class OperationFailed(RuntimeError):
    """An operation gave up; the message names it, the rank that owed, and the remedy. See docs/user/failures.md."""


def check() -> None:
    """Raises if an operation of this process has failed. Call it once a step, after the step's results are there.

    It reads host memory alone: no device is asked, nothing is waited for. A failure that has not happened yet when it
    is called shows at the next call; results are poisoned (NaN) from the failed operation on in any case.

    Raises:
      OperationFailed: until `xen_moe_jax.cuda.reset()`. Every rank and process names the same root.
    """
    text = failure()
    if text:
        raise OperationFailed(text)
