"""The replicas of a strategy, as its values and its input see them, and their public contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from syncvar.core.errors import ConfigError
from syncvar.data.iterator_state import integer_of

if TYPE_CHECKING:
    from syncvar.runtime.communicator import Communicator


class ReplicaGroup(Protocol):
    """What reductions and distributed datasets need of a `Strategy`."""

    strict: bool
    reproducible: bool
    timeout: float | None

    @property
    def communicator(self) -> Communicator:
        """The communicator of the replicas."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The replica for which `experimental_distribute_values_from_function` makes a value.

    Example:
        >>> import syncvar as sv
        >>> sv.ValueContext().num_replicas_in_sync
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True, slots=True)
class InputContext:
    """The replica for which `distribute_datasets_from_function` makes a dataset.

    Args:
        num_input_pipelines: Number of datasets, one for each process.
        input_pipeline_id: Number of this dataset.
        num_replicas_in_sync: Number of replicas of the strategy.

    Example:
        >>> import syncvar as sv
        >>> context = sv.InputContext(num_input_pipelines=4, num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of one replica's batch.

        Args:
            global_batch_size: Rows of all replicas' batches together, at least 0.

        Returns:
            Rows of one replica's batch.

        Raises:
            ConfigError: The number of replicas does not divide the batch.
        """
        size = integer_of("global_batch_size", global_batch_size, 0)
        replicas = self.num_replicas_in_sync
        each, rest = divmod(size, replicas)
        if rest:
            raise ConfigError(
                f"{size} rows cannot be shared evenly by {replicas} replicas; take {size - rest} "
                f"or {size - rest + replicas}, or distribute global batches with "
                f"strategy.experimental_distribute_dataset, which cuts any size"
            )
        return each
