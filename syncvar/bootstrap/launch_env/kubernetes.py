"""An indexed job of Kubernetes, alone or in a JobSet: one rank for each pod."""

from __future__ import annotations

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, port_of, whole
from syncvar.core.errors import ConfigError

__all__ = ["IndexedJob"]

_PORT = 29500
_SIZE = "SYNCVAR_WORLD_SIZE"


class IndexedJob(LaunchEnvironment):
    """Pods that know their index. How many they are, and the name of the first, the manifest has to say.

    Of a JobSet with several jobs, its labels say which of them this is, how many, and how often all were started again: the
    manifest makes them variables.
    """

    name = "an indexed job of Kubernetes"
    rank = "JOB_COMPLETION_INDEX"
    sizes = (_SIZE,)
    remedy = (
        "Let the manifest say the rest, as `env` of the container: SYNCVAR_WORLD_SIZE, the number of pods; MASTER_ADDR, the name of the first "
        "(JOB-0.SERVICE, with a headless service and `subdomain: SERVICE`; in a JobSet its annotation jobset.sigs.k8s.io/coordinator); and "
        "SYNCVAR_KEY_FILE, a secret that all mount"
    )

    def is_present(self) -> bool:
        """Return whether this is a pod of an indexed job."""
        return self.rank in self.environ

    def told(self) -> LaunchInfo | None:
        """Return what it says of this process; None where the manifest has not said what is missing.

        Raises:
            ConfigError: What it says is wrong.
        """
        size, address = self.size(), self.environ.get("MASTER_ADDR", "")
        if not size or (size > 1 and not address):
            return None
        rank = whole(self.environ, self.rank)
        if "JOBSET_GLOBAL_REPLICAS" in self.environ:
            jobs, job = (
                whole(self.environ, name)
                for name in ("JOBSET_GLOBAL_REPLICAS", "JOBSET_JOB_GLOBAL_INDEX")
            )
            if not jobs or size % jobs:
                raise ConfigError(
                    f"{_SIZE}={size} is no multiple of JOBSET_GLOBAL_REPLICAS={jobs}: all jobs of the set have as many pods"
                )
            rank += job * (size // jobs)
        if rank >= size:
            raise ConfigError(
                f"{self.rank}={self.environ[self.rank]} is rank {rank}, outside of {_SIZE}={size}: the number of pods of all jobs"
            )
        port = port_of(self.environ.get("MASTER_PORT", str(_PORT)), "MASTER_PORT")
        again = self.environ.get("JOBSET_RESTART_ATTEMPT", "")
        restarts = whole(self.environ, "JOBSET_RESTART_ATTEMPT") if again else 0
        return LaunchInfo(
            self.source(), rank, size, 0, 1, rank, size, address, port, again, restarts
        )
