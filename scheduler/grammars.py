"""The requests that have a grammar: which of them wait for it, and which of their tokens complete the text.

Owned by scheduler.scheduler, which moves requests and reports ends; grammars and matchers are the manager's.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.request import Request, RequestStatus
from scheduler.structured_output import GrammarBitmask, GrammarFailure, GrammarManager, GrammarStatus


class GrammarRequests:
    """Unfinished requests with a grammar.

    Attributes:
        num_waiting: Those whose grammar is not there yet. They are in no queue.
    """

    def __init__(self, manager: GrammarManager) -> None:
        self._manager = manager
        self._requests: dict[str, Request] = {}
        self.num_waiting = 0

    def begin(self, request: Request) -> bool:
        """Ask for the request's grammar. True: it is there, the request may be queued.

        False: the request is WAITING_FOR_GRAMMAR until `settle` names it. Tokens it has already (it is taken up again
        after a failure) are told to its matcher.
        """
        form = request.sampling_params.structured_outputs
        if form is None:
            raise ValueError(f"request {request.request_id} has no structured_outputs")
        status = self._manager.request_grammar(
            request.request_id,
            form,
            stop_token_ids=request.sampling_params.stop_token_ids,
            ignore_eos=request.sampling_params.ignore_eos,
            output_token_ids=request.token_ids[request.num_prompt_tokens :],
        )
        self._requests[request.request_id] = request
        if status is GrammarStatus.READY:
            return True
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.num_waiting += 1
        return False

    def settle(self) -> tuple[list[Request], list[tuple[Request, GrammarFailure]]]:
        """Requests whose grammar has come, WAITING from now on; and those to be ended with an error."""
        ready = [self._requests[request_id] for request_id in self._manager.take_ready()]
        for request in ready:
            request.status = RequestStatus.WAITING
        self.num_waiting -= len(ready)
        failures = self._manager.take_failures()
        return ready, [(self._requests[failure.request_id], failure) for failure in failures]

    def complete(self, requests: Iterable[Request]) -> list[Request]:
        """Take in the last token of each of `requests`; returns those whose text is complete with it."""
        return [
            request for request in requests if self._manager.accept_tokens(request.request_id, request.token_ids[-1:])
        ]

    def fill_bitmask(self, requests: Iterable[Request]) -> GrammarBitmask | None:
        """The masks of the next token of each of `requests`, by row."""
        return self._manager.fill_bitmask((request.row, request.request_id) for request in requests)

    def release(self, request: Request) -> None:
        """The request ends."""
        if self._requests.pop(request.request_id, None) is None:
            return
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.num_waiting -= 1
        self._manager.release(request.request_id)
