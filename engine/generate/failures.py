"""Errors that end texts. A text's error is always an `Exception`, whatever was raised.

Extensions in Rust raise their panics as `BaseException`, which no `except Exception` sees: a thread
would end without a word, and its texts would wait for ever.
"""

import torch

from exl2flow.core.errors import InferenceError, OutOfDeviceMemory

ENDS_PROGRAM = (KeyboardInterrupt, SystemExit, GeneratorExit)  # never taken for a text's error


def as_text_error(error: BaseException) -> Exception:
    """Return what the reader of a text gets for an error; it names the error as its cause."""
    failure: Exception
    match error:
        case torch.OutOfMemoryError() | MemoryError():
            failure = OutOfDeviceMemory(
                "no memory is left for what a text's settings, filters or adapters need; leave "
                "them out, or give the generator fewer `slots` or `tokens`"
            )
        case Exception():
            return error
        case _:
            failure = InferenceError(
                f"a library that the text needs failed with `{type(error).__name__}`: {error}"
            )
    failure.__cause__ = error
    return failure
