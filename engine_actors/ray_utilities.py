"""Arguments and results of utility calls as bytes. Functions and exceptions are among them, so by cloudpickle (Ray's).

Both ends are parts of one engine; nothing that comes from users over the network is unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any

from ray import cloudpickle

from engine_actors.messages import UtilityMessage, UtilityOutput


def utility_message(call_id: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UtilityMessage:
    return UtilityMessage(call_id, name, cloudpickle.dumps((args, kwargs)))


def utility_result(call_id: int, result: Any) -> UtilityOutput:
    """Answers with an error instead when the result cannot be pickled."""
    try:
        return UtilityOutput(call_id, result=cloudpickle.dumps(result))
    except Exception as error:
        return utility_failure(call_id, TypeError(f"the utility's result cannot be sent: {error}"))


def utility_failure(call_id: int, error: BaseException) -> UtilityOutput:
    """An exception that cannot be pickled travels as RuntimeError with its text."""
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return UtilityOutput(call_id, error=data)


def utility_arguments(message: UtilityMessage) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call."""
    args, kwargs = pickle.loads(message.arguments)
    return args, kwargs


def utility_value(output: UtilityOutput) -> Any:
    """The result, or raise the exception of the engine's side."""
    if output.error is not None:
        raise pickle.loads(output.error)
    return pickle.loads(output.result or b"")
