"""An Indexed Job of Kubernetes, alone or in a JobSet: one rank in each pod."""

from __future__ import annotations

from syncvar.bootstrap.launch_env.base import LaunchEnvironment, LaunchInfo, port_of, whole
from syncvar.core.errors import ConfigError

_PORT = 29500
_SIZE = "SYNCVAR_WORLD_SIZE"


class IndexedJob(LaunchEnvironment):
    """Pods that know their index; the manifest has to say their number and the name of the first.

    In a JobSet with several jobs, labels say which job this is, how many there are, and the number
    of restarts. The manifest turns them into variables.
    """

    name = "an indexed job of Kubernetes"
    rank = "JOB_COMPLETION_INDEX"
    sizes = (_SIZE,)
    remedy = (
        "Let the manifest say the rest, as `env` of the container: SYNCVAR_WORLD_SIZE, the "
        "number of pods; MASTER_ADDR, the name of the first (JOB-0.SERVICE, with a headless "
        "service and `subdomain: SERVICE`; in a JobSet its annotation "
        "jobset.sigs.k8s.io/coordinator); and SYNCVAR_KEY_FILE, a secret that all mount"
    )

    def is_present(self) -> bool:
        """Return whether this is a pod of an Indexed Job."""
        return self.rank in self.environ

    def info(self) -> LaunchInfo | None:
        """Return the identity of this process; None if the manifest is not sufficient.

        Raises:
            ConfigError: The variables are wrong.
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
                    f"{_SIZE}={size} is no multiple of JOBSET_GLOBAL_REPLICAS={jobs}: all jobs of "
                    "the set have as many pods"
                )
            rank += job * (size // jobs)
        if rank >= size:
            raise ConfigError(
                f"{self.rank}={self.environ[self.rank]} is rank {rank}, outside of "
                f"{_SIZE}={size}: the number of pods of all jobs"
            )
        port = port_of(self.environ.get("MASTER_PORT", str(_PORT)), "MASTER_PORT")
        again = self.environ.get("JOBSET_RESTART_ATTEMPT", "")
        restarts = whole(self.environ, "JOBSET_RESTART_ATTEMPT") if again else 0
        return LaunchInfo(
            self.source(), rank, size, 0, 1, rank, size, address, port, again, restarts
        )
