"""Every deliberate error of the project.

Exl2FlowError
├── ConfigError
├── SourceModelError     ─ UnsupportedArchitecture · MissingTensor · TensorShapeError
├── ChatTemplateError
├── CalibrationError     ─ NotEnoughRows
├── QuantizationError    ─ SingularHessian · NonFiniteState · ReconstructionMismatch
├── AllocationError      ─ BudgetUnreachable
├── StoreError           ─ CorruptCheckpoint · WorkDirBusy · ReadFailed · WriteFailed
├── KernelError          ─ BackendUnavailable
├── InferenceError       ─ ContextOverflow · CacheFull · OutOfDeviceMemory · FilterDeadEnd ·
│                          TextStuck · UnknownPromptFormat
├── ValidationFailed
├── PreflightFailed
├── SweepFailed
├── ServerFailed
├── AgentFailed
├── HubError              ─ HubUnavailable
├── PublicationRefused
├── PublicationDamaged
└── Interrupted

A message says what is wrong, where, and what to do.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

NO_JSON = (OSError, ValueError, RecursionError)  # raised by files that hold no JSON


class Exl2FlowError(Exception):
    """Base of all deliberate errors.

    retryable: whether another attempt can succeed; result: of a run that failed at its end.
    """

    retryable = False
    result: Any = None


class ConfigError(Exl2FlowError):
    """An option is out of range or two options contradict each other."""


class SourceModelError(Exl2FlowError):
    """The source folder cannot be used as a model."""


class UnsupportedArchitecture(SourceModelError):
    """`config.json` names an architecture or a variant that no family row describes."""


class MissingTensor(SourceModelError):
    """A tensor that the config implies is not in the model's files."""


class TensorShapeError(SourceModelError):
    """A tensor's shape differs from what the config implies, or cannot be quantized."""


class ChatTemplateError(Exl2FlowError):
    """The model has no chat template, or the template cannot render what it is given."""


class CalibrationError(Exl2FlowError):
    """The calibration data cannot be read or used."""


class NotEnoughRows(CalibrationError):
    """The text is too short for the requested rows."""


class QuantizationError(Exl2FlowError):
    """Rounding a matrix failed."""


class SingularHessian(QuantizationError):
    """A Hessian has no Cholesky factor at any damping."""


class NonFiniteState(QuantizationError):
    """NaN or infinity in a weight or a hidden state."""


class ReconstructionMismatch(QuantizationError):
    """A written matrix does not decode to what was quantized."""


class AllocationError(Exl2FlowError):
    """Bits could not be allocated."""


class BudgetUnreachable(AllocationError):
    """No choice of candidates meets the target bits per weight."""


class StoreError(Exl2FlowError):
    """The work directory or an output file cannot be used."""


class CorruptCheckpoint(StoreError):
    """A checkpoint file is damaged."""


class WorkDirBusy(StoreError):
    """Another process works in this work directory."""


class ReadFailed(StoreError):
    """A file that is there could not be read: a faulty disk, a lost share or permissions."""


class WriteFailed(StoreError):
    """A file could not be written: disk full, file size limit or permissions."""


class KernelError(Exl2FlowError):
    """A kernel cannot run."""


class BackendUnavailable(KernelError):
    """The requested device cannot be used on this machine."""


class InferenceError(Exl2FlowError):
    """Running a model failed."""


class ContextOverflow(InferenceError):
    """Prompt and requested tokens exceed the model's positions."""


class CacheFull(InferenceError):
    """Prompt and requested tokens exceed the empty cache."""


class OutOfDeviceMemory(InferenceError):
    """The device has too little free memory for a computation."""


class FilterDeadEnd(InferenceError):
    """The filters of a text, and what is banned in it, leave no token to sample."""


class TextStuck(InferenceError):
    """A text cannot go on because of what its request asks for, such as bans and a grammar."""


class UnknownPromptFormat(InferenceError):
    """There is neither a prompt format nor a template file of that name."""


class ValidationFailed(Exl2FlowError):
    """Perplexity or divergence is above its limit."""


class PreflightFailed(Exl2FlowError):
    """Problems found before any work was done; the message lists all of them.

    plan: rows (what, value) of what would be done, if the problems leave a plan.
    """

    plan: Sequence[tuple[str, str]] = ()


class SweepFailed(Exl2FlowError):
    """Some bitrates of a sweep could not be made; the message lists them, one per line."""


class ServerFailed(Exl2FlowError):
    """No Prefect API answers, or a temporary server did not start."""


class AgentFailed(Exl2FlowError):
    """An agent's program is missing, or no server serves its model."""


class HubError(Exl2FlowError):
    """The Hugging Face Hub refused a request or cannot be used."""


class HubUnavailable(HubError):
    """The Hub did not answer, or asked to come back later."""

    retryable = True

    def __init__(self, message: str, *, wait: float | None = None) -> None:
        """Store how many seconds the Hub wants us to wait, if it says so."""
        super().__init__(message)
        self.wait = wait


class PublicationRefused(Exl2FlowError):
    """Quality, licence or missing facts forbid publishing; the message lists all reasons."""


class PublicationDamaged(Exl2FlowError):
    """The files on the Hub differ from what was uploaded or do not run; they stay private."""


class Interrupted(Exl2FlowError):
    """The user stopped the run; everything finished so far is committed."""

    def __init__(self, message: str, *, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    def __reduce__(self) -> tuple[object, ...]:
        """Make it picklable despite the keyword-only argument."""
        return partial(Interrupted, signum=self.signum), self.args
