"""Machines of an elastic membership, and rules, that are wrong: the simulated jobs must show it."""

from syncvar.protocol.elastic_membership import (
    AnnounceChange,
    Assign,
    BreakUp,
    CommonCommit,
    Dismiss,
    ElasticMembership,
    Tag,
    common_commit,
)


class FormsAtOnce(ElasticMembership):
    """It does not wait for members that still run."""

    def _awaited(self):
        return []


class WaitsForAll(ElasticMembership):
    """It waits for spares, and for workers that come later, too."""

    def _awaited(self):
        return list(self._workers)


class AcceptsOldMessages(ElasticMembership):
    """It takes an enrollment that the worker sent before its assignment arrived."""

    def enroll(self, worker, heard, now, holds=None):
        found = self._workers.get(worker)
        if found is not None and heard < found.assigned:
            heard = found.assigned
        return super().enroll(worker, heard, now, holds)


class AcceptsOldProcesses(ElasticMembership):
    """It takes an enrollment of a process that another one has replaced."""

    def enroll(self, worker, heard, now, holds=None):
        found = self._workers.get(worker)
        heard = heard if found is None else min(heard, found.assigned)
        return super().enroll(worker, heard, now, holds)


class RefusesNewProcesses(ElasticMembership):
    """It mistakes a new process for an old one whose enrollment it has taken by error."""

    def enroll(self, worker, heard, now, holds=None):
        found = self._workers.get(worker)
        if found is not None and heard < found.assigned and not self.is_forming:
            return []
        return super().enroll(worker, heard, now, holds)


class AcceptsTheLost(ElasticMembership):
    """It takes a worker back that counts as lost."""

    def enroll(self, worker, heard, now, holds=None):
        if worker not in self._workers and not self.is_hopeless:
            self.started(worker, 0)
            self._workers[worker].assigned = heard
        return super().enroll(worker, heard, now, holds)


class PrefersNewcomers(ElasticMembership):
    """It gives newcomers places before holders of the state."""

    def _assign(self, ready):
        members, self.members = self.members, ()
        first = [one for one in ready if one not in members]
        more = [one for one in ready if one in members]
        chosen = [*first, *more][: self.largest]
        return super()._assign(chosen)


class IgnoresHosts(ElasticMembership):
    """It orders the members by number only."""

    def _assign(self, ready):
        found = super()._assign(ready)
        self.members = tuple(sorted(found.members))
        return Assign(found.generation, self.members)


class GrowsTooLarge(ElasticMembership):
    """It takes all that wait."""

    def _assign(self, ready):
        largest, self.largest = self.largest, len(ready)
        found = super()._assign(ready)
        self.largest = largest
        return found


class FormsTooSmall(ElasticMembership):
    """It forms a generation of one."""

    def _proceed(self, now):
        smallest = self.smallest
        if self.is_forming and self._waiting():
            self.smallest = 1
        try:
            return super()._proceed(now)
        finally:
            self.smallest = smallest


class WaitsForEver(ElasticMembership):
    """It expels nobody."""

    def _late(self):
        return []


class ExpelsTheNew(ElasticMembership):
    """It gives a process that has just started no time."""

    def _late(self):
        for state in self._workers.values():
            state.is_due = True
        return super()._late()


class ForgetsTheExpelled(ElasticMembership):
    """It gives up although an expelled worker will be started again."""

    expelled = frozenset()

    def tick(self, now):
        self.expelled = frozenset(self._late() if now >= self.due() else ())
        actions = super().tick(now)
        self.expelled = frozenset()
        return actions

    def _proceed(self, now):
        self._coming -= self.expelled
        return super()._proceed(now)


class IsAlwaysDue(ElasticMembership):
    """It lets a clock run after the end of the job."""

    def finished(self, worker):
        deadline = self._deadline
        actions = super().finished(worker)
        self._deadline = deadline
        return actions

    def tick(self, now):
        return super().tick(now) if self.is_forming else []


class DismissesHolders(ElasticMembership):
    """It lets a worker leave that alone holds the state."""

    def _may_hold(self, worker):
        return not self._workers[worker].is_leaving


class KeepsTheLeaving(ElasticMembership):
    """It never dismisses a worker that leaves."""

    def _look_for_change(self):
        return [one for one in super()._look_for_change() if not isinstance(one, Dismiss)]


class AnnouncesNothing(ElasticMembership):
    """Newcomers wait for ever."""

    def _look_for_change(self):
        return [one for one in super()._look_for_change() if not isinstance(one, AnnounceChange)]


class DismissesNobody(ElasticMembership):
    """Those that wait at the end of the job wait for ever."""

    def finished(self, worker):
        super().finished(worker)
        return []


class BreaksNothingUp(ElasticMembership):
    """Members of a generation that has ended are not interrupted."""

    def enroll(self, worker, heard, now, holds=None):
        found = super().enroll(worker, heard, now, holds)
        return [one for one in found if not isinstance(one, BreakUp)]

    def left(self, worker, reason, now, *, returns=False):
        found = super().left(worker, reason, now, returns=returns)
        return [one for one in found if not isinstance(one, BreakUp)]


def newest_of_all(tags):
    """Return the newest snapshot of any holder, which others may not have."""
    found = common_commit(tags)
    newest = max((tags[rank].newest for rank in found.holders), default=-1)
    return CommonCommit(found.holders, newest)


def without_generation(tags):
    """Return the common commit, as if each state were of the same generation."""
    return common_commit([Tag(min(tag.generation, 0), tag.newest) for tag in tags])


def one_before(tags):
    """Return the commit before the common one, if the workers still have it."""
    found = common_commit(tags)
    return CommonCommit(found.holders, max(found.number - 1, min(found.number, 0)))
