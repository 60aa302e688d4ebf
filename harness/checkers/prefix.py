"""PREFIX: a request carries the prompt ids and every kept token; kept tokens never change.

A restart from the prompt is allowed when all kept tokens go together
(spec/README.md#restarts).
"""

from __future__ import annotations

from harness.checkers import HOLDS, Case, Finding, Judgement
from harness.checkers.trace import Exchange, Trace, Turn, response_ids
from harness.history import SampleView


def check(case: Case) -> Judgement:
    trace, judged = case.trace, False
    for sample, turn in trace.all_turns:
        for number, exchange in enumerate(turn.exchanges):
            judged = True
            problem = _input(trace, turn, exchange, turn.exchanges[:number])
            if problem:
                return Finding(turn.index, problem, sample)
        if turn.after is not None:
            judged = judged or bool(turn.entry.response_length)
            problem = _kept(trace, turn, turn.after)
            if problem:
                return Finding(turn.index, problem, sample)
    return HOLDS if judged else None


def _input(trace: Trace, turn: Turn, exchange: Exchange, before: tuple[Exchange, ...]) -> str | None:
    ids, entry = exchange.request.input_ids, response_ids(turn.entry)
    if exchange.request.images != trace.schedule.images:
        return f"the request carries {exchange.request.images} of {trace.schedule.images} images"
    if ids is None:
        images_at_start = exchange.request.images > 0 and exchange.request.text == turn.entry.prompt
        return None if images_at_start else "the request carries text, not the ids"
    if ids[: trace.prompt] != trace.prompt_ids:
        return f"the input does not begin with the {trace.prompt} prompt ids"
    rest = ids[trace.prompt :]
    if rest in ((), entry):
        return None
    # A client that goes on inside one call may send what it was given in that call.
    given = (_base(trace, e) + e.ids for e in before)
    if rest[: len(entry)] == entry and any(g[: len(rest)] == rest for g in given):
        return None
    return f"the input has {len(rest)} response ids, not the {len(entry)} kept"


def _kept(trace: Trace, turn: Turn, after: SampleView) -> str | None:
    kept, entry = response_ids(after), response_ids(turn.entry)
    if after.tokens and after.tokens[: len(after.tokens) - after.response_length] != trace.prompt_ids:
        if len(after.tokens) - after.response_length == trace.prompt:
            return "the prompt ids on the sample change"
        return None  # the lengths disagree: ALIGN's to say
    if not kept or (kept == entry and _same(after.logprobs, turn.entry.logprobs, len(kept))):
        return None
    close = kept == entry  # the right tokens, and only their logprobs are not
    # What a request may have gone on from: the sample at the start, or what came earlier in this call.
    # Each once: sixty tries that bring nothing must not double it sixty times.
    known = {(entry, turn.entry.logprobs or ()): None}
    for exchange in turn.exchanges:
        base = _base(trace, exchange)
        before = dict.fromkeys(probs[: len(base)] for ids, probs in known if ids[: len(base)] == base) or {(): None}
        grown = base + exchange.ids
        known |= dict.fromkeys((grown, probs + exchange.logprobs) for probs in before)
        if grown[: len(kept)] != kept or len(kept) < len(base):
            continue
        if after.logprobs is None or len(after.logprobs) != len(kept):
            return None  # ALIGN's to say
        if turn.entry.logprobs is None and entry and base:
            return None
        if any(after.logprobs == (probs + exchange.logprobs)[: len(kept)] for probs in before):
            return None if trace.room(len(kept)) <= 0 else _torn(trace, exchange, len(kept) - len(base))
        close = True
    if close:
        return "the logprobs are not those that were delivered"
    if kept[: len(entry)] != entry:
        return f"the {len(entry)} kept tokens change"
    if entry and turn.exchanges and not _base(trace, turn.exchanges[-1]):
        return f"the request leaves out what stays on the sample ({len(entry)} tokens)"
    return f"keeps {len(kept)} tokens that no request brought together"


def _torn(trace: Trace, exchange: Exchange, count: int) -> str | None:
    """Of a plain reply, or of an event, all tokens are kept or none; but for a last stop token (item 6).

    Not asked of a sample that is full: what goes beyond its budget is cut.
    """
    if trace.schedule.faulty_engine or count in (0, *exchange.ends):
        return None
    if exchange.ids[count:] == (trace.history.eos,):
        return None
    return f"keeps {count} of {len(exchange.ids)} tokens, which did not come apart there"


def _base(trace: Trace, exchange: Exchange) -> tuple[int, ...]:
    """The response tokens the request went on from: () when it began at the prompt."""
    ids = exchange.request.input_ids
    return () if ids is None else ids[trace.prompt :]


def _same(after: tuple[float, ...] | None, before: tuple[float, ...] | None, length: int) -> bool:
    """Equal logprobs, or lists whose lengths are wrong anyway (ALIGN)."""
    return after is None or before is None or len(after) != length or after == before
