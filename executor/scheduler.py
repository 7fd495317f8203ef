"""What runs next: requests, budgets and memd's answers become a `Plan`.

Pure: no socket, no clock, no tensor, no log. The engine calls, in this order and for ever,

    proposal = propose()           while plan k is about to run, what step k+1 asks of memd
    deltas = update(plan k, ...)   the tokens plan k drew
    plan k+1 = settle(proposal, ...)   what memd granted becomes rows

or, while plan k still runs and `may_settle` says that nobody has to make room,

    plan k+1 = settle(proposal, ...)   rows in which tokens that plan k draws are UNKNOWN
    deltas = update(plan k, ...)
    plan k+1 = complete(plan k+1)      the tokens are put in

or, where `goes_on` says that they change nothing else and has put them in, plan k+1 may run before

    deltas = go_on(plan k, ...)

`propose` needs no token ids: it works from what *will* be true when plan k has run, where a sequence that
draws has one more token whose value is not known. Whoever finishes, fails or is aborted in between simply has
no row in plan k+1, and its blocks go back with the message after that.

Groups are ordered by (priority, arrival) everywhere: who computes, who is admitted, who is preempted.
Iteration-level scheduling is from Orca (Yu et al., OSDI'22), the all-or-nothing treatment of a group and
preemption by recomputation from PagedAttention (Kwon et al., SOSP'23), chunked prefill from Sarathi
(Agrawal et al., 2023).
"""

from __future__ import annotations

import struct
from bisect import insort
from dataclasses import dataclass

from executor import preempt, tables
from executor.accept import Bounds, accept, blocks_needed
from executor.budget import cut
from executor.decoding import Decoding
from executor.news import News
from executor.plan import Drawn, Draws, Ids, Lanes, Plan, Row, of_lanes
from executor.proposal import Proposal, Wants
from executor.queue import Habits, Queue
from executor.request import Group, Sequence, State
from executor.rows import build, fill
from wire.errors import Code, Refused
from wire.generate import Delta, Failed, Submit, TokenLogprobs, TopToken
from wire.memory import MAX_TOKEN_BYTES, Admit, Admitted, Fork, Granted, Refusal

# Bytes of token ids in one step's admissions. One admission goes whatever its size.
ADMISSION_BYTES = MAX_TOKEN_BYTES // 2
# Bytes of token ids in one step's commits, once for running sequences and once for those that leave. What
# is over waits, or is not kept for reuse when its sequence is gone.
COMMIT_BYTES = MAX_TOKEN_BYTES // 2
# Steps in a row the only running request may be refused a block before it is failed.
STARVED_STEPS = 64


@dataclass(slots=True)
class Counters:
    """Rise from the start of the process."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Scheduler:
    """Requests in their queues. See the module's head for the protocol of calls."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.step_tokens = bounds.step_tokens  # the engine lowers it when steps take too long
        self.waiting = Queue(bounds)
        self.running: list[Group] = []  # in (priority, arrival) order, as is the queue
        self.now = 0.0  # seconds; set by the engine, which has the clock
        self.counters = Counters()
        self._decoding = Decoding(bounds.block_size)
        self._apart: list[Group] = []  # running, with members that stand in no lane; in order
        self._failures: list[tuple[bytes, Failed]] = []
        self._groups: dict[tuple[bytes, int], Group] = {}
        self._sequences: dict[int, Sequence] = {}  # unfinished ones, by memd's name
        self._habits = Habits()
        self._next_id = 1
        self._arrivals = 0
        self._leaving_bytes = 0
        self._leaving = Wants()  # last commits and frees of sequences that ended, for the next step
        self._freed_blocks = 0  # at most this many come free with those
        self._available = bounds.blocks  # blocks that could be granted after the last step
        self._starved = 0

    # ------------------------------------------------------------ requests come and go

    def submit(self, peer: bytes, submit: Submit, deadline: float | None = None) -> None:
        """Queue a request.

        Raises:
            Refused: INVALID, CONTEXT_LENGTH, NEVER_FITS, DUPLICATE or OVERLOADED; nothing has changed.
        """
        if (peer, submit.id) in self._groups:
            raise Refused(Code.DUPLICATE, f"request id {submit.id} is already in use")
        order = (submit.priority, self._arrivals)
        group = accept(self.bounds, submit, peer=peer, order=order, deadline=deadline)
        self.waiting.check_space(len(group.prompt))
        self._arrivals += 1
        group.arrived = self.now
        self._groups[peer, submit.id] = group
        for seq in group.live:
            self._rename(seq)
        self.waiting.add(group)

    def abort(self, peer: bytes, request: int) -> None:
        """Forget a request; its blocks go back with the next message. Unknown ids are ignored."""
        if (group := self._groups.get((peer, request))) is not None:
            self._end(group, "aborted")

    def abort_all(self, peer: bytes) -> int:
        """Forget all requests of a gateway; returns how many."""
        groups = [group for group in self._groups.values() if group.peer == peer]
        for group in groups:
            self._end(group, "its gateway is gone")
        return len(groups)

    def fail(self, group: Group, code: Code, message: str, *, commit: bool = True) -> None:
        """End a request with an error. `commit`: whether what it has written may be reused."""
        self._failures.append((group.peer, Failed(group.id, code, message)))
        self._end(group, code.value, commit=commit)

    def fail_all(self, code: Code, message: str) -> None:
        """End every request with an error."""
        for group in list(self._groups.values()):
            self.fail(group, code, message)

    def expire(self, now: float) -> None:
        """Fail requests that have not started and whose deadline has passed."""
        for group in self.waiting.overdue(now):
            self.fail(group, Code.OVERLOADED, "the request's deadline passed while it was waiting")

    def take_failures(self) -> list[tuple[bytes, Failed]]:
        """Failures since the last call, with the gateway each is for."""
        taken, self._failures = self._failures, []
        return taken

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, or memd must still hear of a finished one."""
        return bool(self._groups or self._leaving)

    @property
    def requests(self) -> int:
        """Unfinished requests."""
        return len(self._groups)

    @property
    def sequences_running(self) -> int:
        return len(self._sequences) - self.waiting.sequences

    def catch_up(self) -> None:
        """Bring the tokens and counters of all running sequences up to date, for who looks at them from
        outside: those in lanes lag behind."""
        self._decoding.catch_up()

    # ------------------------------------------------------------ the three calls of a step

    def propose(self, fills: bool = False) -> Proposal:
        """What the next step wants, assuming the plan at hand runs as planned.

        Args:
            fills: also tell memd how full the last blocks are, for its gauges.
        """
        wants, available = self._leaving, self._available + self._freed_blocks
        self._leaving, self._leaving_bytes, self._freed_blocks = Wants(), 0, 0
        proposal = Proposal(wants)
        proposal.left = self._propose_running(proposal)
        if fills and self.running:
            wants.fills = self._fills()
        if proposal.left > 0 and len(self.waiting):
            self._propose_waiting(proposal, available - len(wants.appends))
        return proposal

    def update(self, plan: Plan, drawn: Draws) -> News:
        """Take in what a plan computed: tokens, and who is finished.

        Args:
            drawn: of every draw of the plan, lanes first; empty if it was lost.

        Returns:
            New tokens. Requests that failed are in `take_failures`.
        """
        lanes, news = plan.lanes, News()
        tokens, others = of_lanes(drawn, len(lanes) if lanes is not None else 0)
        if any(one.token < 0 for one in others) or min(tokens, default=0) < 0:
            self._fail_what_is_no_number(drawn)
        if lanes is not None and tokens:
            self._update_lanes(lanes, tokens, news)
        if plan.others:
            self._update_others(plan.others, others, news)
        self.counters.generated_tokens += news.count
        return news

    def goes_on(self, plan: Plan, following: Plan, drawn: Draws) -> bool:
        """Whether the plan settled before `update` is right as it is: all decode, as in the one before, and
        nobody ended. Then its tokens are put in, and `go_on` may come while it runs.

        Args:
            plan: whose draws these are.
        """
        lanes, decoding = following.lanes, self._decoding
        if plan.others or following.others or lanes is None or plan.lanes is None:
            return False
        if not decoding.same(lanes) or not decoding.same(plan.lanes):
            return False
        tokens, _ = of_lanes(drawn, len(lanes))
        if min(tokens) < 0 or decoding.may_end(tokens):
            return False
        lanes.tokens.extend(tokens)
        return True

    def go_on(self, plan: Plan, drawn: Draws) -> News:
        """`update` and `complete` where `goes_on` was true: nobody comes or goes."""
        lanes, news = plan.lanes, News()
        if lanes is not None:
            tokens, _ = of_lanes(drawn, len(lanes))
            self._decoding.take(lanes, tokens)
            news.add_lanes(lanes, tokens, ())
            self.counters.generated_tokens += news.count
        return news

    def may_settle(self, granted: Granted) -> bool:
        """Whether `settle` may come before `update`: whom to preempt depends on who is finished by then."""
        if granted.refused:
            return False
        waiting, running = self.waiting, self.running
        return not waiting or not running or waiting.first.priority >= running[-1].priority

    def complete(self, plan: Plan) -> Plan:
        """A plan that was settled before `update`, with the tokens of that; the same one if nobody ended."""
        others, lanes = fill(plan.others, self._sequences), plan.lanes
        if lanes is not None:
            lanes = self._decoding.complete(lanes)
        if others is plan.others and lanes is plan.lanes:
            return plan
        return Plan(plan.number, others, plan.copies, lanes)

    def settle(self, proposal: Proposal, granted: Granted) -> Plan:
        """Turn memd's answer into the plan to run, and preempt if memory ran out."""
        refused = {refusal.seq: refusal for refusal in granted.refused}
        self._available = granted.usage.free + granted.usage.cached
        changes, decoding = granted.changes, self._decoding
        if changes or proposal.growing or proposal.forked:
            self._leaving.frees += tables.apply(
                proposal, changes, refused, self._sequences, self.bounds.block_size, decoding.moved
            )
        rows = proposal.rows
        if refused:
            rows = [entry for entry in rows if entry[1] not in refused]
        if proposal.entering:
            rows = rows + self._enter(proposal, granted.admitted)
        if refused or self._starved or self.waiting:
            self._make_room(proposal, refused)
            self._stop_stuck(refused)
        lanes = decoding.step(proposal.joined)
        others = build(rows, refused, self._sequences) if rows else []
        return Plan(granted.number, others, granted.copies, lanes)

    # ------------------------------------------------------------ when things go wrong

    def memory_lost(self) -> None:
        """memd has forgotten everything: all requests go back to the queue with the tokens they have."""
        self._decoding.lost()
        for group in list(self.running):
            self._preempt(group, "memory daemon lost")
        self._leaving, self._leaving_bytes, self._freed_blocks = Wants(), 0, 0
        self.waiting.forget_refusal()

    def step_lost(self, plan: Plan) -> None:
        """A plan ran out of the device's memory: fail its largest request, recompute all others."""
        self._decoding.lost()
        groups = {s.group for row in plan.rows if (s := self._sequences.get(row.seq)) is not None}
        if groups:
            largest = max(groups, key=lambda g: (sum(len(s.tokens) for s in g.live), g.order))
            self.fail(
                largest,
                Code.INTERNAL,
                f"the device ran out of memory while it computed this request of "
                f"{len(largest.prompt)} prompt tokens, the largest of its step",
            )
        for group in list(self.running):
            self._preempt(group, "step lost")

    # ------------------------------------------------------------ propose, in parts

    def _propose_running(self, proposal: Proposal) -> int:
        """Rows and appends of running groups; returns the token budget that is left."""
        decoding, rows = self._decoding, proposal.rows
        # Lanes are for steps with room for all that flow: else who does is decided anew in every step.
        most = self.bounds.step_tokens
        if fit := self.bounds.sequences <= most or self.sequences_running <= most:
            for seq in decoding.due():
                if decoding.ends(seq):
                    self._leave(seq)
                else:
                    self._look_after(seq, proposal)
        elif decoding:
            decoding.dissolve()
            self._apart = self.running.copy()
        ends: list[int] = []  # of each group with rows: how many there are up to its last one
        total = 0
        apart: list[Group] = []
        for group in self._apart:
            if not group.together:
                self._propose_forks(group, proposal)
            before = len(rows)
            for seq in group.live if group.together else group.live[:1]:
                if seq.lane >= 0:
                    continue
                want = seq.wanted()
                if want == 1 and fit and decoding.takes(seq):
                    decoding.join(seq)
                    proposal.joined.append(seq)
                    self._look_after(seq, proposal)
                    continue
                grows = seq.computed + want > seq.room
                if grows or seq.untold(self.bounds.block_size):
                    self._commit(seq, proposal)
                if want > 0:
                    rows.append((seq, seq.id, want))
                    total += want
            if len(rows) > before:
                ends.append(len(rows))
            if not group.together or any(seq.lane < 0 for seq in group.live):
                apart.append(group)
        self._apart = apart
        left = self.step_tokens - len(decoding) - total
        if left < 0:
            left = 0
            counts = cut(
                [count for _, _, count in rows], ends, self.step_tokens, most, len(decoding)
            )
            given = zip(rows, counts, strict=True)
            rows = proposal.rows = [(seq, name, count) for (seq, name, _), count in given if count]
        for seq, _, count in rows:
            if seq.computed + count > seq.room:
                proposal.grow(seq, seq.computed + count)
        if proposal.growing:
            proposal.ask_growing()
        return left

    def _commit(self, seq: Sequence, proposal: Proposal) -> None:
        """Tell memd of full blocks, unless there is no more space for it in this step."""
        size = self.bounds.block_size
        if seq.written // size > seq.committed // size and proposal.committed < COMMIT_BYTES:
            commit = seq.commit(size)
            if commit is not None:
                proposal.wants.commits.append(commit)
                proposal.committed += len(commit.tokens)

    def _look_after(self, seq: Sequence, proposal: Proposal) -> None:
        """What a sequence in a lane asks of memd in the next step."""
        decoding, size = self._decoding, self.bounds.block_size
        if soon := seq.untold(size):
            decoding.sync(seq)
            self._commit(seq, proposal)
            soon = seq.untold(size)
        end = decoding.position(seq) + 1
        if end > seq.room:
            self._commit(seq, proposal)  # of what it has been given of its tokens
            proposal.grow(seq, end)
        decoding.plan_ahead(seq, soon=soon)

    def _leave(self, seq: Sequence) -> None:
        """From its lane; its group goes on."""
        self._decoding.leave(seq)
        if seq.group not in self._apart:
            insort(self._apart, seq.group, key=lambda g: g.order)

    def _propose_forks(self, group: Group, proposal: Proposal) -> None:
        """Once the lead's prompt is computed, the others begin where it ends, on the same blocks."""
        lead, start = group.live[0], len(group.prompt)
        if lead.computed < start or (lead.pending and group.limit == 1):
            return
        for child in group.live[1:]:
            proposal.wants.forks.append(Fork(lead.id, child.id, start))
            proposal.forked.append((child, child.id))
            child.computed = child.written = child.known = child.room = start
            # The lead commits the shared full blocks; the child's first commit is for one of its own.
            child.committed = start
        # A partial last block is shared now: whoever writes to it asks first.
        lead.room = start
        group.together = True

    def _propose_waiting(self, proposal: Proposal, available: int) -> None:
        """Admissions, strictly in order, while tokens, sequences and bytes last."""
        left = proposal.left
        admits = proposal.wants.admits
        if self.running and not self.waiting.worth_asking(available):
            return
        slots = self.bounds.sequences - self.sequences_running
        size = 0
        for group in self.waiting:
            tokens = len(group.opening())
            size += 4 * tokens
            if len(group.live) > slots or (admits and size > ADMISSION_BYTES):
                return
            if group.restarted and self.running:
                need = self._return_cost(group)
                if need > available:
                    return
                available -= need
            lead = group.live[0]
            admits.append(Admit(lead.id, group.opening_bytes(), left, group.tenant))
            proposal.entering.append((group, lead.id, left))
            slots -= len(group.live)
            left -= max(1, tokens - self._habits.guess(group, self.bounds.block_size))
            if left <= 0:
                return

    def _return_cost(self, group: Group) -> int:
        """Blocks that should be free before a preempted group comes back, lest it is preempted again:
        all it had, and one for every other of the running sequences, which keep growing."""
        longest = max(len(seq.tokens) for seq in group.live) + 1
        new = longest - len(group.prompt)
        need = blocks_needed(self.bounds, len(group.prompt), new, len(group.live))
        return need + self.sequences_running // 2

    def _fills(self) -> bytes:
        pairs = self._decoding.fills()
        for group in self._apart:
            for seq in group.live:
                if seq.held and seq.lane < 0:
                    pairs += (seq.id, seq.computed)
        return struct.pack(f"<{len(pairs)}Q", *pairs)

    # ------------------------------------------------------------ update, in parts

    def _update_lanes(self, lanes: Lanes, tokens: Ids, news: News) -> None:
        decoding, sequences, names = self._decoding, self._sequences, lanes.members.names
        if decoding.may_end(tokens):
            for name, token in zip(names, tokens, strict=True):
                seq = sequences.get(name)
                if seq is not None and seq.lane >= 0 and token in seq.group.stops:
                    self._leave(seq)
        odd = [] if decoding.same(lanes) else decoding.strangers(lanes)
        decoding.take(lanes, tokens)
        for place in odd:
            if (seq := sequences.get(names[place])) is not None:
                seq.written = lanes.start(place) + 1
                news.add(seq.group.peer, self._take(seq, Drawn(names[place], tokens[place])))
        news.add_lanes(lanes, tokens, odd)

    def _update_others(self, rows: list[Row], drawn: list[Drawn], news: News) -> None:
        sequences = self._sequences
        for row in rows:
            if (seq := sequences.get(row.seq)) is not None:
                seq.written = row.start + len(row.tokens)
        for result in drawn:
            if (seq := sequences.get(result.seq)) is not None:
                news.add(seq.group.peer, self._take(seq, result))

    def _fail_what_is_no_number(self, drawn: Draws) -> None:
        for result in drawn:
            if result.token < 0 and (seq := self._sequences.get(result.seq)) is not None:
                # Its KV of this step is suspect too, so it is freed without a commit of it.
                self.fail(
                    seq.group,
                    Code.NOT_NUMBERS,
                    "the model's output was not a number (NaN or infinity) for this request",
                )

    def _take(self, seq: Sequence, result: Drawn) -> Delta:
        group, token = seq.group, result.token
        seq.pending -= 1
        seq.tokens.append(token)
        seq.output.append(token)
        length = len(seq.output)
        finish = ""
        if token in group.stops and length > group.sampling.min_tokens:
            finish = "stop"
        elif length >= group.limit:
            finish = "length"
        if finish:
            self._finish(seq)
        logprobs = []
        if group.sampling.logprobs >= 0:
            top = [TopToken(*pair) for pair in result.top]
            logprobs = [TokenLogprobs(result.logprob, top)]
        if length > 1:
            return Delta(group.id, seq.choice, [token], finish, 0, logprobs)
        queued = int(1000 * group.queued)
        return Delta(group.id, seq.choice, [token], finish, group.cached, logprobs, queued)

    def _finish(self, seq: Sequence) -> None:
        group = seq.group
        group.live.remove(seq)
        self._release(seq)
        if not group.live:
            self._end(group, "done")

    # ------------------------------------------------------------ settle, in parts

    def _enter(
        self, proposal: Proposal, admitted: list[Admitted]
    ) -> list[tuple[Sequence, int, int]]:
        """Start the groups that were admitted; returns their leads' rows."""
        granted = {entry.seq: entry for entry in admitted}
        left, rows = proposal.left, []
        for group, lead_id, chunk in proposal.entering:
            entry = granted.get(lead_id)
            if entry is None:
                continue
            if lead_id not in self._sequences:
                self._leaving.frees.append(lead_id)  # aborted since
                continue
            lead, tokens = group.live[0], len(group.opening())
            group.move(State.RUNNING, f"admitted with {entry.computed} of {tokens} tokens cached")
            self.waiting.remove(group)
            self.waiting.note(group, None, 0)
            for groups in (self.running, self._apart):
                insort(groups, group, key=lambda g: g.order)
            group.together = len(group.live) == 1
            if not group.restarted:
                group.cached = min(entry.computed, len(group.prompt))
                group.queued = self.now - group.arrived
                self.counters.prompt_tokens += len(group.prompt)
            lead.held = True
            lead.blocks = list(entry.blocks)
            lead.room = len(lead.blocks) * self.bounds.block_size
            lead.computed = lead.written = lead.committed = entry.computed
            lead.known = tokens
            self._habits.learn(group, self.bounds.block_size, entry.computed)
            # Hits were guessed: if less was cached than that, the last ones wait for the next step.
            count = min(chunk, tokens - entry.computed, left)
            if count:
                rows.append((lead, lead_id, count))
                left -= count
        return rows

    def _stop_stuck(self, refused: dict[int, Refusal]) -> None:
        """Who got no block has no row in this step, nor has its group: so they leave their lanes."""
        for seq_id in refused:
            if (seq := self._sequences.get(seq_id)) is not None:
                for member in seq.group.live:
                    if member.lane >= 0:
                        self._leave(member)

    def _make_room(self, proposal: Proposal, refused: dict[int, Refusal]) -> None:
        """Preempt for those who could not grow, and for a newcomer of better priority."""
        short: dict[Group, int] = {}
        available = self._available
        for _, _, seq, seq_id, _ in proposal.growing:
            refusal = refused.get(seq_id)
            if refusal is None or seq_id not in self._sequences:
                continue
            if refusal.code is Code.NEVER_FITS:
                self._never(seq.group, refusal)
                continue
            short[seq.group] = short.get(seq.group, 0) + refusal.need
            available = refusal.available
        for group in preempt.for_growth(self.running, short, available + self._freed_blocks):
            self._preempt(group, "pool full")
            self.counters.preemptions += 1
        self._starved = self._starved + 1 if short and len(self.running) == 1 else 0
        if self._starved >= STARVED_STEPS:
            self.fail(
                self.running[0],
                Code.NO_BLOCKS,
                "no KV block came free although nothing else runs; are blocks pinned in memd?",
            )
        for group, lead_id, _ in proposal.entering:
            refusal = refused.get(lead_id)
            if refusal is not None and lead_id in self._sequences:
                if refusal.code is Code.NEVER_FITS:
                    self._never(group, refusal)
                elif refusal.code is Code.NO_BLOCKS:
                    self.waiting.note(group, refusal, self._available)
        if self.running and len(self.waiting):
            self._prefer(self.waiting.first)

    def _never(self, group: Group, refusal: Refusal) -> None:
        self.fail(
            group,
            Code.NEVER_FITS,
            f"the request needs {refusal.need} more KV blocks, more than its tenant can ever have: "
            "shorten it, or start the server with more --kv-memory",
        )

    def _prefer(self, first: Group) -> None:
        """Let the first in the queue in if all that is in its way is of strictly worse priority."""
        if first.priority >= self.running[-1].priority:
            return
        # A step without a token to spare for it is in its way as much as a bound on sequences.
        most = min(self.bounds.sequences, self.step_tokens)
        slots = len(first.live) - (most - self.sequences_running)
        available = self._available + self._freed_blocks
        lacks = self.waiting.lacking(first, available)
        if first.restarted:
            lacks = max(lacks, self._return_cost(first) - available)
        for group in preempt.for_priority(self.running, first, lacks, slots):
            self._preempt(group, f"made room for priority {first.priority}")
            self.counters.preemptions += 1

    # ------------------------------------------------------------ moves

    def _rename(self, seq: Sequence) -> None:
        seq.start_over(self._next_id)
        self._sequences[seq.id] = seq
        self._next_id += 1

    def _release(self, seq: Sequence, *, commit: bool = True) -> None:
        """Give its blocks back with the next message, after telling memd what in them is written."""
        if seq.lane >= 0:
            self._decoding.leave(seq)
        del self._sequences[seq.id]
        if seq.held:
            if commit and self._leaving_bytes < COMMIT_BYTES:
                last = seq.commit(self.bounds.block_size)
                if last is not None:
                    self._leaving.commits.append(last)
                    self._leaving_bytes += len(last.tokens)
            self._leaving.frees.append(seq.id)
            self._freed_blocks += len(seq.blocks)
            seq.held = False

    def _stop(self, group: Group) -> None:
        self.running.remove(group)
        if group in self._apart:
            self._apart.remove(group)

    def _preempt(self, group: Group, why: str) -> None:
        """Take all blocks of a group and queue it again, in its old place, with the tokens it has."""
        group.move(State.PREEMPTED, why)
        self._stop(group)
        for seq in group.live:
            self._release(seq)
            self._rename(seq)
        group.together = False
        group.move(State.WAITING, "will recompute")
        self.waiting.add(group)

    def _end(self, group: Group, why: str, *, commit: bool = True) -> None:
        if group.state is State.WAITING:
            self.waiting.remove(group)
        else:
            self._stop(group)
        for seq in group.live:
            self._release(seq, commit=commit)
        group.live = []
        group.move(State.FINISHED, why)
        del self._groups[group.peer, group.id]
