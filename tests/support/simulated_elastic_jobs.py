"""Elastic jobs in virtual time: the machine of the membership, models of all else, and what must hold.

One `random.Random(seed)` decides the size of the job, the order of all events, and the faults.

The model of a worker does what `sv.elastic` does: it enrolls, joins the generation to which it is
assigned, compares tags, restores the common commit or takes it from a holder, and makes steps.
A call of a generation is complete when all members have entered it. Each member learns that at a
time of its own, so a call may be complete on one member, and fail on another.

What must hold:

1. *Commits.* Let commit `c` complete on any member of generation `g`, at any time. Let `h` be a
   later generation with a process of `g` among its members. If any member of `h` synchronizes,
   then it goes on from `c` or from a descendant of `c`. Two things follow. No commit is lost while
   a process of its generation takes part. Two generations complete one number with different
   content only if no process of the first takes part in the second, or in any between.
   The design gives it: `c` is complete only if all members of `g` have taken its snapshot, and a
   living member stays a member of all later generations. So a holder of the newest tag has `c`.
   A late completion in `g` after `h` has begun is no exception: its snapshots were taken before.
   So a member of the next generation has a tag as new as any living member of the last one.
2. *Agreement.* All members of a generation synchronize to the same commit, and each holder has it.
3. *Sizes.* A generation has MIN to MAX members, each once, ordered by host. They have enrolled.
4. *An end.* After the last fault the job finishes all steps, or gives up while fewer than MIN
   workers run, or will be started. Workers that wait are dismissed. No clock remains that is due.
5. *Fairness.* Only a worker that was stopped, cut off or hung is expelled.
"""

import heapq
import random

from syncvar.protocol.elastic_membership import (
    AnnounceChange,
    Assign,
    BreakUp,
    Dismiss,
    ElasticMembership,
    Expel,
    GiveUp,
    Tag,
    common_commit,
)

PATIENCE_S = 10.0
LOST_AFTER_S = 3.0
FAULTS_S = 20.0  # no fault begins later
MOST_EVENTS = 8_000
FOREVER = float("inf")
FAULTS = ("kill", "kill", "host", "stop", "cut", "leave", "last_leaves", "link", "late", "join")
LOCAL_FAULTS = ("kill", "link", "stop", "late")  # at a moment that the protocol chooses


class Violation(AssertionError):
    """Something that must hold does not."""


class Commit:
    """The content of a snapshot: two are equal if they are the same object."""

    __slots__ = ("generation", "number", "parent")

    def __init__(self, number, generation, parent):
        self.number, self.generation, self.parent = number, generation, parent

    def __repr__(self):
        return f"commit {self.number} of generation {self.generation}"

    def contains(self, other):
        one = self
        while one.number > other.number:
            one = one.parent
        return one is other


INITIAL = Commit(0, -1, None)


class Process:
    """A process of a worker, and its ends of the channel to the launcher."""

    __slots__ = (
        "assignments",
        "change",
        "current",
        "cut_until",
        "expelled",
        "frozen_until",
        "generation",
        "heard",
        "host",
        "is_alive",
        "is_done",
        "is_hung",
        "is_waiting",
        "leaves",
        "place",
        "received",
        "sent",
        "snapshots",
        "tag",
        "trouble",
        "worker",
    )

    def __init__(self, worker, host, now, is_hung):
        self.worker, self.host, self.is_hung = worker, host, is_hung
        self.is_alive, self.is_done, self.is_waiting = True, False, False
        self.leaves = self.change = self.expelled = False
        self.generation = self.place = self.current = None
        self.heard, self.tag, self.snapshots = -1, Tag(-1, -1), {}
        self.assignments = []
        self.frozen_until = self.cut_until = 0.0
        self.sent = self.received = 0.0  # when the last message arrives: channels keep the order
        self.trouble = FOREVER if is_hung else -FOREVER  # the end of its last fault

    def __repr__(self):
        return f"worker {self.worker}"


class Generation:
    """The members of a generation, and their calls."""

    def __init__(self, number, members):
        self.number, self.members = number, members
        self.entered = {}  # call -> the members in it, with their values
        self.snapshots = {}
        self.common = None
        self.source_is_ready = False
        self.is_broken = False  # a member has left it, or the launcher has ended it
        self.synchronized = None  # the commit from which it goes on
        self.completed = None  # the newest commit that is complete on a member

    def has_step_call(self, number):
        """Return whether the step before a commit has a collective call, for all members alike."""
        return (self.number * 7 + number) % 3 > 0


class SimulatedElasticJob:
    """A job of one seed.

    Args:
        seed: Decides everything.
        membership: The class of the machine, to run with one that is wrong.
        rule: The rule of commits, likewise.
        keeps: How many snapshots a worker keeps.
    """

    def __init__(self, seed, membership=ElasticMembership, rule=common_commit, keeps=2):
        self.seed, self.rule, self.keeps = seed, rule, keeps
        self.rng = random.Random(seed)
        self.draw = draw = self.rng.random
        self.smallest = self.rng.randint(1, 3)
        self.largest = self.smallest + self.rng.randint(0, 3)
        self.hosts = self.rng.randint(1, 3)
        self.steps = self.rng.randint(4, 20)
        self.restarts = self.rng.choice((0, 2, 6, 20))
        self.faults_left = self.rng.choice((0, 1, 3, 6, 12, 20))
        self.trigger = self.rng.choice((0.0, 0.03, 0.3))  # a fault with an event of the protocol
        self.local_faults = self.rng.choice((("link",), LOCAL_FAULTS))
        self.has_calls = draw() < 0.7  # steps have collective calls
        self.refuses_old = draw() < 0.5  # the launcher refuses messages of replaced processes
        self.tags_early = draw() < 0.5  # holders have the new tag before newcomers have the state
        self.resets_early = draw() < 0.3  # a worker may take an old announcement for a new one
        self.sends_holds = draw() < 0.8
        self.exits_to_leave = (
            draw() < 0.5 or not self.sends_holds
        )  # else it enrolls, and waits for its dismissal
        self.now, self.count, self.events, self.heap = 0.0, 0, 0, []
        self.machine = membership(self.smallest, self.largest, PATIENCE_S)
        self.processes, self.generations = [], []
        self.present = {}  # worker -> the process that the launcher knows
        self.peers = {}  # worker -> the process that enrolled last
        self.coming = set()  # workers that will be started
        self.queue = set()  # processes that have enrolled, and have no assignment
        self.misled = set()  # workers for which the machine has taken an older process
        self.announced = -1  # the last generation whose members know that a change is due
        self.next_tick = FOREVER
        self.has_finished, self.gave_up = False, ""
        self.expelled = self.late_commits = 0

    def run(self):
        """Run the job to its end; returns it."""
        first = self.largest + self.rng.randint(0, 2)
        self.machine.expect(range(first))
        self.coming.update(range(first))
        for worker in range(first):
            self.soon(1.0, self.start, worker, self.rng.randrange(self.hosts))
        self.free = first
        for _ in range(self.faults_left):
            self.at(self.draw() * FAULTS_S, self.fault)
        heap = self.heap
        while heap and not self.gave_up:
            self.now, _, method, args = heapq.heappop(heap)
            self.events += 1
            if self.events > MOST_EVENTS:
                raise Violation(f"{self}: no end after {MOST_EVENTS} events")
            method(*args)
        self.check_end()
        return self

    def __str__(self):
        return f"seed {self.seed}, {self.now:.3f} s"

    def require(self, holds, sentence):
        if not holds:
            raise Violation(f"{self}: {sentence}")

    # -- time --------------------------------------------------------------------------------------

    def at(self, when, method, *args):
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, method, args))

    def soon(self, seconds, method, *args):
        self.at(self.now + seconds * self.draw(), method, *args)

    def is_asleep(self, process, method, *args):
        """Return whether a process is stopped; then the event comes when it wakes."""
        if self.now >= process.frozen_until:
            return False
        self.at(process.frozen_until + 0.2 * self.draw(), method, *args)
        return True

    # -- the launcher ------------------------------------------------------------------------------

    def start(self, worker, host):
        if self.has_finished:
            return
        self.coming.discard(worker)
        process = Process(worker, host, self.now, self.draw() < 0.01)
        self.processes.append(process)
        self.present[worker] = process
        self.machine.started(worker, host)
        if not process.is_hung:
            self.soon(1.5, self.enroll, process)

    def lose(self, process, can_return):
        """Learn that a process has ended, or count it as lost."""
        worker = process.worker
        if self.present.get(worker) is not process:
            return
        del self.present[worker]
        self.queue.discard(process)
        last = self.generations[-1] if self.generations else None
        if can_return and last is not None and process in last.members:
            self.break_up(last)  # the launcher does so itself, except at an end in order
        returns = can_return and self.restarts > 0
        if returns:
            self.restarts -= 1
            self.coming.add(worker)
            self.at(self.now + 0.5 + self.draw(), self.start, worker, process.host)
        self.do(self.machine.left(worker, "it is lost", self.now, returns=returns))

    def count_as_lost(self, process, since):
        """Lose a silent process, and end it; on a host that is cut off it lives on for a while."""
        is_silent = self.now < max(process.frozen_until, process.cut_until)
        if process.is_alive and is_silent and not process.is_done:
            self.lose(process, can_return=True)
            self.at(since + 4 * self.draw(), self.kill, process)

    def handle(self, process, kind, heard, holds):
        """Handle a message of a worker."""
        worker, machine = process.worker, self.machine
        is_present = self.present.get(worker) is process
        if not is_present and self.refuses_old:
            return
        if kind == "enroll":
            if is_present:
                self.peers[worker] = process
            elif heard < 0:
                self.misled.add(worker)  # nothing shows that the process is an older one
            actions = machine.enroll(worker, heard, self.now, holds)
            found = machine._workers.get(worker)
            if is_present and found is not None and (actions or found.is_waiting):
                self.queue.add(process)
            if heard >= 0:
                self.check_break_up(process, actions)
            self.do(actions)
        elif self.peers.get(worker) is not process:
            pass  # the launcher takes other messages from the process that enrolled last
        elif kind == "run_ended":
            actions = machine.finished(worker)
            self.has_finished = self.has_finished or machine.is_finishing
            self.do(actions)
        else:
            self.do(machine.leaving(worker, self.now))

    def check_break_up(self, process, actions):
        """Require that a generation ends because a member has really left it."""
        for action in actions:
            if isinstance(action, BreakUp):
                generation = self.generations[action.generation]
                self.require(
                    process.heard >= action.generation and process.generation is not generation,
                    f"generation {action.generation} ends, and {process} has not left it",
                )

    def check_prompt(self):
        """Require that nobody waits in vain for what could happen at once."""
        machine = self.machine
        if self.has_finished or machine.is_hopeless or not self.generations:
            return
        states, last = machine._workers, self.generations[-1]
        queue = [one for one in self.queue if self.present.get(one.worker) is one]
        staying = [one for one in queue if not states[one.worker].is_leaving]
        if not machine.is_forming:
            self.require(len(staying) == len(queue), "a worker that leaves is not dismissed")
            has_room = len(last.members) < self.largest
            self.require(
                not (has_room and staying) or self.announced == last.number,
                f"{staying} wait, and nobody knows",
            )
            return
        running = [one for one in last.members if self.present.get(one.worker) is one]
        awaited = [one for one in running if not one.expelled and one not in self.queue]
        is_ready = len(staying) >= self.smallest and not awaited and not self.misled
        self.require(not is_ready, f"{staying} could form a generation")

    def tick(self):
        self.next_tick = FOREVER
        self.do(self.machine.tick(self.now))
        self.require(self.machine.due() > self.now, "the clock is due again at once")

    def do(self, actions):
        for action in actions:
            kind = type(action)
            if kind is Assign:
                self.assign(action)
            elif kind is BreakUp:
                self.break_up(self.generations[action.generation])
            elif kind is AnnounceChange:
                self.announced = len(self.generations) - 1
                for worker in action.members:
                    self.send_down(worker, "change")
            elif kind is Dismiss:
                for worker in action.workers:
                    self.queue.discard(self.present.get(worker))
                    self.send_down(worker, "dismissal")
            elif kind is Expel:
                self.expel(action.worker)
            elif kind is GiveUp:
                self.give_up(action.reason)
        self.check_prompt()
        due = self.machine.due()
        if due < self.next_tick:
            self.next_tick = due
            self.at(max(due, self.now), self.tick)

    def assign(self, action):
        members = action.members
        # Of at most one worker there are two, when one gives the state to the other and leaves.
        has_leaving = any(map(self.machine.is_leaving, members))
        largest = max(self.largest, 1 + has_leaving)
        self.require(self.smallest <= len(members) <= largest, f"{action} has a wrong size")
        self.require(len(set(members)) == len(members), f"{action} names a worker twice")
        self.require(action.generation == len(self.generations), f"{action} has a wrong number")
        processes = [self.present.get(worker) for worker in members]
        self.require(None not in processes, f"{action} names a worker that is lost")
        hosts = [process.host for process in processes]
        self.require(hosts == sorted(hosts), f"{action} is not ordered by host")
        last = self.generations[-1].members if self.generations else []
        for one in last:
            if one.is_alive and not one.expelled and self.present.get(one.worker) is one:
                self.require(
                    any(member.tag.generation >= one.tag.generation for member in processes),
                    f"{action} leaves out {one}, which holds the newest state",
                )
        generation = Generation(action.generation, processes)
        self.generations.append(generation)
        for process in processes:
            worker = process.worker
            self.require(
                process in self.queue or worker in self.misled, f"{process} has not enrolled"
            )
            self.queue.discard(process)
            self.misled.discard(worker)
            self.send_down(worker, generation)
        self.maybe_fault(generation)

    def break_up(self, generation):
        generation.is_broken = True
        for process in generation.members:
            if process.generation is generation:
                self.at(self.arrival(process, 0.5), self.fail, process, generation)

    def expel(self, worker):
        process = self.present.get(worker)
        self.require(not self.has_finished, f"worker {worker} is expelled after the end")
        self.require(process is not None, f"a lost worker {worker} is expelled")
        self.require(
            self.now < process.trouble + 3 * PATIENCE_S, f"{process} is expelled for no reason"
        )
        self.expelled += 1
        process.expelled = True
        self.at(self.arrival(process, 0.5), self.kill, process)

    def give_up(self, reason):
        self.gave_up = reason
        possible = {
            worker
            for worker, process in self.present.items()
            if process.is_alive and not process.expelled and not process.leaves
        }
        # An expelled worker may be started again.
        back = [one for one in self.present.values() if one.expelled][: self.restarts]
        self.require(
            len(possible | self.coming) + len(back) < self.smallest,
            f"the job gives up ({reason}), and {sorted(possible | self.coming)} are possible",
        )

    # -- the control channel -----------------------------------------------------------------------

    def arrival(self, process, seconds):
        return max(self.now, process.cut_until) + seconds * self.draw()

    def send_up(self, process, kind, heard=-1, holds=None):
        process.sent = max(process.sent, self.arrival(process, 0.3))
        self.at(process.sent, self.handle, process, kind, heard, holds)

    def send_down(self, worker, message):
        process = self.peers.get(worker)
        if process is not None:
            process.received = max(process.received, self.arrival(process, 0.3))
            self.at(process.received, self.receive, process, message)

    def receive(self, process, message):
        if not process.is_alive:
            return
        if self.now < process.frozen_until:
            process.received = max(process.received, process.frozen_until)
            self.at(process.received, self.receive, process, message)
        elif message == "change":
            process.change = True
        elif message == "dismissal":
            if process.is_waiting:
                self.end(process)
        else:
            process.change = process.change and self.resets_early
            process.assignments.append(message)
            if process.is_waiting:
                self.join(process)

    # -- workers -----------------------------------------------------------------------------------

    def enroll(self, process):
        if not process.is_alive or self.is_asleep(process, self.enroll, process):
            return
        process.is_waiting, process.change = True, False
        if process.heard < 0 and self.faults_left > 0 and self.draw() < 0.05:
            self.faults_left -= 1
            self.fault_late(process)
        holds = process.tag.generation if self.sends_holds else None
        self.send_up(process, "enroll", process.heard, holds)
        if self.draw() < 0.05:  # the user interrupts the wait, and calls again
            self.soon(0.5, self.enroll_again, process, process.heard)
        if process.assignments:
            self.join(process)

    def enroll_again(self, process, heard):
        if process.is_waiting and process.is_alive:
            holds = process.tag.generation if self.sends_holds else None
            self.send_up(process, "enroll", heard, holds)

    def join(self, process):
        generation = process.assignments.pop()
        process.assignments.clear()
        process.is_waiting = False
        process.generation, process.heard = generation, generation.number
        self.enter(process, generation, "join")
        self.at(self.now + PATIENCE_S, self.time_out, process, generation)

    def time_out(self, process, generation):
        if process.place == "join":
            self.fail(process, generation)

    def enter(self, process, generation, call, value=None):
        """Enter a call; when all members have, it completes on each of them."""
        if not process.is_alive or process.generation is not generation:
            return
        if self.is_asleep(process, self.enter, process, generation, call, value):
            return
        process.place = call
        if generation.is_broken:
            self.soon(1.0, self.fail, process, generation)
        entered = generation.entered.setdefault(call, {})
        entered[process] = value
        if call == "state":
            self.enter_state(process, generation)
        elif len(entered) == len(generation.members):
            for member in generation.members:
                self.soon(0.4, self.complete, member, generation, call)

    def enter_state(self, process, generation):
        """A holder sends the state, and goes on; newcomers wait for it."""
        holders = generation.common.holders
        ranks = [generation.members.index(process)]
        if ranks[0] in holders:
            if ranks[0] == holders[0]:
                generation.source_is_ready = True
                newcomers = [
                    rank
                    for rank, member in enumerate(generation.members)
                    if rank not in holders and member in generation.entered["state"]
                ]
                ranks += newcomers
        elif not generation.source_is_ready:
            return
        for rank in ranks:
            self.soon(0.4, self.complete, generation.members[rank], generation, "state")

    def complete(self, process, generation, call):
        if not process.is_alive or process.generation is not generation:
            return
        if self.is_asleep(process, self.complete, process, generation, call):
            return
        if call == "join":
            self.enter(process, generation, "tags", process.tag)
        elif call == "tags":
            self.compare_tags(process, generation)
        elif call == "state":
            if generation.members.index(process) not in generation.common.holders:
                source = generation.members[generation.common.holders[0]]
                process.snapshots = {}
                process.current = generation.sent[source]
            self.begin(process, generation)
        elif call == "end":
            process.is_done, process.generation = True, None
            self.send_up(process, "run_ended")
            self.at(process.sent + self.draw(), self.end, process)
            self.maybe_fault(generation)
        elif call[0] == "step":
            self.commit(process, generation)
        else:
            self.complete_commit(process, generation, call)

    def compare_tags(self, process, generation):
        if generation.common is None:
            tags = generation.entered["tags"]
            generation.common = self.rule([tags[member] for member in generation.members])
            generation.sent = {}
        holders, number = generation.common
        if not holders:
            process.current = INITIAL
            self.begin(process, generation)
            return
        if generation.members.index(process) in holders:
            self.require(
                number in process.snapshots, f"{process} has no snapshot {number} of its own"
            )
            generation.sent[process] = process.current = process.snapshots[number]
            if self.tags_early:
                self.hold(process, generation)
        if len(holders) < len(generation.members):
            self.enter(process, generation, "state")
        else:
            self.begin(process, generation)

    def hold(self, process, generation):
        current = process.current
        process.snapshots = {
            number: one for number, one in process.snapshots.items() if number < current.number
        }
        process.snapshots[current.number] = current
        process.tag = Tag(generation.number, current.number)

    def begin(self, process, generation):
        """Go on from the common commit."""
        self.hold(process, generation)
        if generation.synchronized is None:
            generation.synchronized = process.current
            for earlier in self.generations[: generation.number]:
                if earlier.completed is not None:
                    self.check_kept(earlier, earlier.completed, generation)
        self.require(
            process.current is generation.synchronized,
            f"{process} goes on from {process.current}, others from {generation.synchronized}",
        )
        self.maybe_fault(generation)
        self.go_on(process, generation)

    def go_on(self, process, generation):
        number = process.current.number + 1
        if number > self.steps:
            self.enter(process, generation, "end")
        elif self.has_calls and generation.has_step_call(number):
            self.soon(0.5, self.enter, process, generation, ("step", number))
        else:
            self.soon(0.5, self.commit, process, generation)

    def commit(self, process, generation):
        """Take a snapshot, and agree with the others that all have it."""
        if not process.is_alive or process.generation is not generation:
            return
        if self.is_asleep(process, self.commit, process, generation):
            return
        current = process.current
        number = current.number + 1
        made = generation.snapshots.setdefault(number, Commit(number, generation.number, current))
        self.require(made.parent is current, f"{process} makes {made} from {current}")
        process.snapshots[number] = made
        while len(process.snapshots) > self.keeps:
            del process.snapshots[min(process.snapshots)]
        process.tag = Tag(generation.number, number)
        self.maybe_fault(generation)
        self.enter(process, generation, ("commit", number), process.change)

    def complete_commit(self, process, generation, call):
        made = generation.snapshots[call[1]]
        self.late_commits += generation.number + 1 < len(self.generations)
        process.current = made
        if generation.completed is not made:
            generation.completed = made
            for later in self.generations[generation.number + 1 :]:
                if later.synchronized is not None:
                    self.check_kept(generation, made, later)
        self.maybe_fault(generation)
        if not any(generation.entered[call].values()):
            self.go_on(process, generation)
            return
        self.leave(process, generation)
        if process.leaves and self.exits_to_leave:
            self.end(process)
        else:
            self.enroll(process)

    def check_kept(self, earlier, commit, later):
        kept = later.synchronized.contains(commit)
        if not kept and not set(earlier.members).isdisjoint(later.members):
            raise Violation(f"{self}: generation {later.number} has lost {commit}")

    def leave(self, process, generation):
        """Leave a generation; the others learn it."""
        process.generation = process.place = None
        generation.is_broken = True
        for member in generation.members:
            if member.generation is generation:
                self.soon(1.0, self.fail, member, generation)

    def fail(self, process, generation):
        """Let the call of a member fail."""
        if not process.is_alive or process.generation is not generation:
            return
        if not self.is_asleep(process, self.fail, process, generation):
            self.leave(process, generation)
            self.enroll(process)

    def end(self, process):
        """End a process in order."""
        if process.is_alive:
            process.is_alive = process.is_waiting = False
            process.sent = max(process.sent, self.arrival(process, 0.3))
            self.at(process.sent, self.lose, process, False)

    def kill(self, process):
        if not process.is_alive:
            return
        process.is_alive = process.is_waiting = False
        generation = process.generation
        if generation is not None:
            self.leave(process, generation)
        self.at(self.arrival(process, 0.3), self.lose, process, True)

    # -- faults ------------------------------------------------------------------------------------

    def maybe_fault(self, generation):
        """Let a fault hit a member of a generation in which something has just happened."""
        if self.faults_left > 0 and self.now < FAULTS_S and self.draw() < self.trigger:
            self.soon(0.3, self.fault, generation.members, self.local_faults)

    def fault(self, processes=None, kinds=FAULTS):
        processes = self.processes if processes is None else processes
        alive = [one for one in processes if one.is_alive and not one.is_done]
        if self.faults_left <= 0 or not alive:
            return
        self.faults_left -= 1
        process = self.rng.choice(alive)
        getattr(self, "fault_" + self.rng.choice(kinds))(process)

    def fault_kill(self, process):
        self.kill(process)

    def fault_host(self, process):
        for one in self.processes:
            if one.host == process.host:
                self.kill(one)

    def fault_stop(self, process):
        process.frozen_until = self.trouble(process, 25.0 if self.draw() < 0.2 else 6.0)

    def fault_cut(self, process):
        process.cut_until = self.trouble(process, 25.0 if self.draw() < 0.2 else 6.0)

    def trouble(self, process, seconds):
        until = self.now + seconds * self.draw()
        process.trouble = max(process.trouble, until)
        if self.draw() < 0.7:
            self.at(self.now + LOST_AFTER_S, self.count_as_lost, process, until)
        return until

    def fault_leave(self, process):
        if not process.leaves:
            process.leaves = True
            self.send_up(process, "leaving")
            self.at(self.now + 5 + 5 * self.draw(), self.kill, process)

    def fault_last_leaves(self, process):
        """A worker leaves, and all other members are lost."""
        self.fault_leave(process)
        if process.generation is not None:
            for member in process.generation.members:
                if member is not process:
                    self.soon(0.8, self.kill, member)

    def fault_late(self, process):
        """A process ends, and the launcher gets its last messages after its successor's first."""
        process.cut_until = max(process.cut_until, self.now + 2 + 6 * self.draw())
        self.at(self.now + 1.5 * self.draw(), self.kill_seen, process)

    def kill_seen(self, process):
        self.kill(process)
        self.lose(process, can_return=True)

    def fault_link(self, process):
        """A connection between two members breaks; their processes live."""
        if process.generation is not None:
            self.fail(process, process.generation)

    def fault_join(self, process):
        """A host or a worker comes."""
        self.machine.expect((self.free,))
        self.coming.add(self.free)
        self.soon(2.0, self.start, self.free, self.rng.randrange(self.hosts + 1))
        self.free += 1

    # -- the end -----------------------------------------------------------------------------------

    def check_end(self):
        if self.gave_up:
            return
        if not self.has_finished:
            running = [one for one in self.present.values() if one.is_alive]
            self.require(
                running and all(one.is_hung for one in running), "nothing happens, and nothing ends"
            )
            return  # as long as nobody waits, a program may take any time before it enrolls
        waiting = [one for one in self.present.values() if one.is_alive and one.is_waiting]
        self.require(not waiting, f"{waiting} wait for ever after the end of the job")
        self.require(self.machine.due() == FOREVER, "a clock is due after the end of the job")
