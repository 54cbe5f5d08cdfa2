"""Words that people bring from tf.distribute, Horovod, mpi4py and torch.distributed, and what to write here instead.

One table for attributes, keywords, ops and options of launchers. It is read where a name is not found, and
`syncvar coming-from words` prints it. A few words are taken as they are; the table says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncvar.core.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SEVERAL_HOSTS = (
    "syncvar-launch logs in to other hosts by itself: write --hostfile FILE, with lines such as node1 slots=4, or -H node1:4,node2:4 "
    "(see --help-hosts)"
)
WITHOUT_SSH = (
    f"{SEVERAL_HOSTS}; without ssh, start the script on each with torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr HOST "
    "--master-port 29500 train.py, or one process for each rank with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT set; on all of them with the same SYNCVAR_KEY (64 hexadecimal digits) or SYNCVAR_KEY_FILE"
)
_MODEL = (
    "a strategy takes no model, and makes none equal: keep your model and optimizer, and write the "
    'lines of "A module of PyTorch" or "A model of Keras" in docs/migrating.md'
)
_METHODS_OF_TF_DATA = (
    "write it in the function of sv.data.from_generator(fn), or into dataset.map(fn)"
)
_OWN_MACHINE = "there is no such choice: shared memory serves on a host, encrypted tcp between hosts; leave it out"


class ForeignName(NamedTuple):
    """Words of one meaning.

    Args:
        place: Where they are looked for: "sv", a room such as "sv.optimizers", a class, "op", "option", "keyword", or
            "NAME()" for keywords of one function or class.
        names: How others spell it.
        text: What to write instead, or what to know.
        is_accepted: They are taken as they are.
    """

    place: str
    names: tuple[str, ...]
    text: str
    is_accepted: bool = False


def _word(place: str, names: str, text: str, *, is_accepted: bool = False) -> ForeignName:
    return ForeignName(place, tuple(names.split()), text, is_accepted)


WORDS = (
    # Accepted.
    _word("sv.optimizers", "RMSprop", "it is sv.optimizers.RMSProp", is_accepted=True),
    _word("CheckpointManager()", "max_to_keep", "it is keep=", is_accepted=True),
    _word("op", "average avg", 'they are "mean"', is_accepted=True),
    _word("coming-from", "torch tf tensorflow hvd mpi",
          "short for torch.distributed, tf.distribute, horovod, mpi4py", is_accepted=True),
    # Who and where.
    _word("sv", "is_chief is_main_process is_master is_leader", "write sv.rank() == 0"),
    _word("sv", "get_rank Get_rank process_index", "write sv.rank()"),
    _word("sv", "size get_world_size Get_size process_count num_processes", "write sv.world_size()"),
    _word("sv", "local_size", "write sv.local_world_size()"),
    _word("sv", "cross_rank node_rank", "write sv.host_index()"),
    _word("sv", "cross_size num_nodes", "write sv.host_count()"),
    _word("sv", "Get_processor_name", "write sv.host_index(), or platform.node() for the name"),
    _word("sv", "init_process_group initialize", "write sv.init(); the first call joins by itself as well"),
    _word("sv", "destroy_process_group Finalize finalize",
          "write sv.shutdown(); the end of the program does it as well"),
    _word("sv", "is_available mpi_built gloo_built nccl_built get_backend",
          "there is one backend, which is always there"),
    _word("sv", "COMM_WORLD MPI comm world",
          "the functions of the module are the world's: sv.rank(), sv.all_reduce(x); others are sv.new_group([0, "
          "1])"),
    _word("sv", "spawn start_processes launch", "write sv.run(fn, workers=4)"),
    _word("sv", "Abort abort",
          "raise an exception: the launcher then ends the other ranks, says who failed and where, and exits with 1"),
    _word("sv", "Wtime", "write time.perf_counter()"),
    # Collectives.
    _word("sv", "allreduce Allreduce allreduce_ Iallreduce allreduce_async",
          'write sv.all_reduce(x), which sums; sv.all_reduce(x, "mean") averages, out=x is in place, async_op=True '
          "returns a Work"),
    _word("sv", "grouped_allreduce all_reduce_coalesced",
          'write sv.all_reduce([x, y], "mean"): a list or dict of arrays is one call; it returns new arrays, and '
          "out=[x, y] writes into x and y"),
    _word("sv", "metric_average average pmean", 'write sv.all_reduce(x, "mean")'),
    _word("sv", "psum", "write sv.all_reduce(x)"),
    _word("sv", "bcast Bcast Ibcast broadcast_ broadcast_async",
          "write sv.broadcast(x, root=0), or sv.broadcast_object(o) for plain data"),
    _word("sv", "broadcast_parameters broadcast_variables broadcast_global_variables",
          "write model.load_state_dict(sv.broadcast(model.state_dict(), root=0)); variables made with sv.Variable begin equal"),
    _word("sv", "broadcast_optimizer_state", "write opt.load_state_dict(sv.broadcast_object(opt.state_dict(), root=0)), for an optimizer `opt` of PyTorch"),
    _word("sv", "broadcast_object_list", "write sv.broadcast_object(o)"),
    _word("sv", "Reduce Ireduce", "write sv.reduce(x, root=0)"),
    _word("sv", "allgather Allgather Allgatherv Iallgather all_gather_into_tensor all_gather_single",
          "write sv.all_gather(x); lengths may differ"),
    _word("sv", "allgather_object", "write sv.all_gather_object(o)"),
    _word("sv", "Gather Gatherv Igather", "write sv.gather(x, root=0); lengths may differ"),
    _word("sv", "Scatter Scatterv Iscatter",
          "write sv.scatter(parts, root=0), a list with a part for each rank; lengths may differ"),
    _word("sv", "reducescatter Ireduce_scatter Reduce_scatter Reduce_scatter_block "
          "reduce_scatter_tensor",
          "write sv.reduce_scatter(x)"),
    _word("sv", "alltoall Alltoall Ialltoall Alltoallv Alltoallw all_to_all_single",
          "write sv.all_to_all(parts), a list with a part for each rank; lengths may differ"),
    _word("sv", "Scan Iscan", "write sv.scan(x)"),
    _word("sv", "Exscan Iexscan", "write sv.exscan(x)"),
    _word("sv", "Barrier Ibarrier monitored_barrier", "write sv.barrier(timeout=30.0); who does not come is named"),
    _word("sv", "LAND BAND LOR BOR LXOR BXOR", 'ops are names: "and", "or", "xor"'),
    _word("sv", "MAXLOC MINLOC",
          'write sv.all_reduce(x, "maxloc") or "minloc", which give (values, ranks)'),
    _word("sv", "Sum SUM Average AVG Min MIN Max MAX Product PROD Op",
          'ops are names: "sum", "mean", "prod", "min", "max"; or members of sv.ReduceOp'),
    _word("sv", "Adasum", 'there is no such op; sv.all_reduce(x, "mean")'),
    _word("sv", "IN_PLACE", "write sv.all_reduce(x, out=x)"),
    _word("sv", "Compression", "arrays travel in their dtype: write sv.all_reduce(x.astype('float16'), \"mean\")"),
    _word("sv", "synchronize wait Wait poll", "async_op=True returns a Work: work.wait(), work.done()"),
    _word("sv", "Waitall waitall", "write results = sv.wait_all(works)"),
    _word("sv", "join Join",
          "write `with sv.uneven(model, optimizer):` around loops of different lengths, which also brings modules of PyTorch "
          "and models of Keras up to date; a distributed dataset ends on all ranks together"),
    # Messages.
    _word("sv", "Send Ssend ssend Rsend rsend",
          "write sv.send(x, dest), or sv.send_object(o, dest) for plain data"),
    _word("sv", "isend Isend issend Issend Irsend irsend",
          "write sv.send(x, dest, async_op=True), which returns a Work"),
    _word("sv", "Recv", "write sv.recv(source), or sv.recv(source, out=x)"),
    _word("sv", "irecv Irecv", "write sv.recv(source, async_op=True), which returns a Work"),
    _word("sv", "Sendrecv", "write y = sv.sendrecv(x, dest, source)"),
    _word("sv", "Sendrecv_replace sendrecv_replace", "write sv.sendrecv(x, dest, source, out=x)"),
    _word("sv", "Bsend bsend Ibsend ibsend buffered_send",
          "write sv.send(x, dest): up to `eager_bytes` it does not wait for the receiver; sv.send(x, dest, async_op=True) never does"),
    _word("sv", "Waitany waitany Waitsome waitsome Testany testany Testsome testsome as_completed",
          "write index = sv.wait_any(works), then works[index].wait()"),
    _word("sv", "Testall testall", "write all([work.done() for work in works])"),
    _word("sv", "Isendrecv isendrecv",
          "start both: works = [sv.send(x, dest, async_op=True), sv.recv(source, async_op=True)], "
          "and write sv.wait_all(works)"),
    _word("sv", "Attach_buffer Detach_buffer Buffer",
          "leave it out: what sv.send takes is copied by itself"),
    _word("sv", "Send_init Recv_init Start Startall Prequest",
          "leave it out: the second call with the same kind of array is a prepared one by itself"),
    _word("sv", "MPIPoolExecutor MPICommExecutor futures ProcessPoolExecutor Pool",
          "write sv.run(fn, workers=4), or sv.ClusterCoordinator(strategy).schedule(fn) for a queue of tasks"),
    _word("sv", "Comm Intracomm", "groups are sv.new_group([0, 1]); the functions of the module are the world's"),
    _word("sv", "Intercomm Create_intercomm Connect Accept", "there are no groups across jobs: start one job, and split it with sv.new_group"),
    _word("sv", "ANY_SOURCE ANY_TAG probe Probe iprobe Iprobe recv_any_source",
          "a receiver names its source, so that the order of messages never depends on time: "
          "start a receive from each rank, works = [sv.recv(r, async_op=True) for r in ranks], and take works[sv.wait_any(works)]"),
    _word("sv", "PROC_NULL",
          "in sv.sendrecv(x, dest, source) None is no rank; else write `if 0 <= to < sv.world_size(): sv.send(x, to)`"),
    _word("sv", "batch_isend_irecv P2POp", "start them with async_op=True, and write sv.wait_all(works)"),
    _word("sv", "send_object_list", "write sv.send_object(o, dest)"),
    _word("sv", "recv_object_list", "write sv.recv_object(source)"),
    _word("sv", "map imap starmap apply_async submit Parallel delayed",
          "write sv.run(fn, workers=4), in which each worker takes items[sv.rank()::sv.world_size()]; or "
          "sv.ClusterCoordinator(strategy).schedule(fn) for a queue of tasks"),
    # Groups.
    _word("sv", "Create_group create_group add_process_set ProcessSet process_set new_subgroups",
          "write sv.new_group([0, 1]), which every rank of the world calls, members or not, in the same order"),
    _word("sv", "Split Comm_split", "write sv.new_group(range(sv.world_size())).split(color, key)"),
    _word("sv", "Dup", "write sv.new_group(range(sv.world_size()))"),
    _word("sv", "Create_cart Cart_create Compute_dims init_device_mesh DeviceMesh",
          "write sv.mesh((2, 2), ('row', 'column')); mesh.row and mesh.column are groups"),
    _word("sv", "Win File Spawn Status Request Datatype",
          "windows, files, spawning and derived types of MPI are not here: arrays travel as they are"),
    # Strategies and training.
    _word("sv", "ParameterServerStrategyV2", "write sv.ParameterServerStrategy(), with syncvar-launch --servers 2"),
    _word("sv", "OneDeviceStrategy TPUStrategy",
          "write sv.MirroredStrategy(), which has one replica without the launcher"),
    _word("sv", "TFConfigClusterResolver ClusterResolver SlurmClusterResolver",
          "TF_CONFIG, torchrun's variables and those of Slurm and mpirun are read by themselves"),
    _word("sv", "distribute experimental",
          "the names of tf.distribute are in sv itself: sv.MirroredStrategy(), sv.ReduceOp"),
    _word("sv", "train", "the names of tf.train are in sv itself: sv.Checkpoint, sv.CheckpointManager"),
    _word("sv", "latest_checkpoint", "write sv.CheckpointManager(checkpoint, directory).latest"),
    _word("sv", "keras GradientTape function metrics callbacks summary layers losses nn Module "
          "estimator",
          "sv has no models, gradients, metrics or callbacks: docs/migrating.md shows a model of Keras and a module of PyTorch; "
          'a metric is sv.Variable(0.0, synchronization="ON_READ", aggregation="SUM")'),
    _word("sv", "MinSizePartitioner", "write sv.partitioners.MinSize(min_shard_bytes, max_shards)"),
    _word("sv", "MaxSizePartitioner", "write sv.partitioners.MaxSize(max_shard_bytes)"),
    _word("sv", "FixedShardsPartitioner", "write sv.partitioners.FixedShards(num_shards)"),
    _word("sv.partitioners", "MinSizePartitioner min_max_variable_partitioner",
          "write sv.partitioners.MinSize(min_shard_bytes, max_shards)"),
    _word("sv.partitioners", "MaxSizePartitioner variable_axis_size_partitioner",
          "write sv.partitioners.MaxSize(max_shard_bytes)"),
    _word("sv.partitioners", "FixedShardsPartitioner fixed_size_partitioner",
          "write sv.partitioners.FixedShards(num_shards)"),
    _word("sv.partitioners", "Partitioner",
          "any function of shape and dtype is a partitioner: it returns the number of parts of "
          "each axis"),
    _word("sv", "Dataset AUTOTUNE", "write sv.data.from_arrays(x, batch_size=32) or sv.data.from_generator(fn)"),
    _word("sv", "DataLoader DistributedSampler TensorDataset",
          "write strategy.experimental_distribute_dataset(sv.data.from_arrays(x, batch_size=32, shuffle=True)), or use PyTorch's "
          "DataLoader with DistributedSampler(dataset, sv.world_size(), sv.rank())"),
    _word("sv", "DistributedOptimizer DistributedGradientTape DistributedTrainStep",
          "for a module of PyTorch write grads = [p.grad for p in model.parameters() if p.grad is not None] and "
          'sv.all_reduce(grads, "mean", out=grads) before opt.step(): out= writes the mean into p.grad; for a model of '
          'Keras write opt.apply_gradients(zip(sv.all_reduce(grads, "mean"), model.trainable_variables)); for variables '
          "of sv write sv.optimizers.SGD(0.1).apply_gradients(pairs)"),
    _word("sv", "DistributedDataParallel DDP FullyShardedDataParallel",
          'write model.load_state_dict(sv.broadcast(model.state_dict(), root=0)) once, and sv.all_reduce(grads, "mean", out=grads) '
          "after each backward pass, a list of them in one call"),
    _word("sv", "elastic",
          "syncvar-launch --max-restarts 3 starts all workers again; sv.CheckpointManager goes on from the newest "
          "checkpoint"),
    _word("sv", "start_timeline timeline", "set SYNCVAR_TRACE=traces, then syncvar trace merge traces"),
    # Optimizers.
    _word("sv.optimizers", "Adadelta Adamax Nadam NAdam Ftrl LARS Lion Rprop Adafactor",
          "it is not here; sv.optimizers has SGD, Momentum, Nesterov, RMSProp, Adagrad, Adam, AdamW, LAMB, and Custom for a rule of your own"),
    _word("sv.optimizers", "Lamb", "write sv.optimizers.LAMB"),
    _word("sv.optimizers", "AdaGrad", "write sv.optimizers.Adagrad"),
    _word("sv.optimizers", "schedules lr_scheduler",
          "learning_rate may be a function of the step: sv.optimizers.SGD(lambda step: 0.1 / (1 + step))"),
    _word("Optimizer", "step", "write optimizer.apply_gradients(zip(gradients, variables))"),
    _word("Optimizer", "lr", "write optimizer.learning_rate"),
    _word("Optimizer", "param_groups",
          "write optimizer.learning_rate; there are no groups of parameters: make an optimizer for each"),
    _word("Optimizer", "state_dict load_state_dict get_weights set_weights weights get_config",
          "write sv.Checkpoint(optimizer=optimizer, w=w).save(path), which saves its state beside "
          "the variables; restore(path) reads it"),
    _word("Optimizer", "zero_grad minimize compute_gradients get_gradients",
          "gradients are yours: write optimizer.apply_gradients(zip(gradients, variables))"),
    _word("keyword", "lr", "write learning_rate="),
    _word("keyword", "betas", "write beta_1=0.9, beta_2=0.999"),
    _word("keyword", "eps", "write epsilon="),
    _word("keyword", "alpha", "write rho="),
    _word("keyword", "clipnorm global_clipnorm max_norm", "write clip_norm="),
    _word("keyword", "clipvalue", "write clip_value="),
    _word("keyword", "backward_passes_per_step gradient_accumulation_steps", "write accumulate="),
    _word("SGD()", "momentum", "write sv.optimizers.Momentum(0.1, momentum=0.9)"),
    _word("SGD()", "nesterov", "write sv.optimizers.Nesterov(0.1, momentum=0.9)"),
    # Strategies' arguments.
    _word("keyword", "devices compute_devices parameter_device", "one replica is one process: syncvar-launch --workers 4 says how many"),
    _word("keyword", "cross_device_ops communication_options",
          "leave it out: the algorithm is chosen by size; SYNCVAR_ALGORITHM demands one"),
    _word("keyword", "cluster_resolver", "leave it out: TF_CONFIG, torchrun's variables and those of Slurm and mpirun are read by themselves"),
    _word("Strategy", "experimental_run_v2", "write strategy.run(fn, args=(x,))"),
    _word("Strategy", "cluster_resolver", "write sv.rank() and sv.world_size()"),
    _word("Strategy", "extended", "what it has in tf.distribute is not here, or is a method of the strategy"),
    _word("Strategy", "make_dataset_iterator experimental_make_numpy_dataset",
          "write strategy.experimental_distribute_dataset(sv.data.from_arrays(x, batch_size=32))"),
    _word("ReplicaContext", "devices replica_id", "write context.replica_id_in_sync_group"),
    # Variables.
    _word("Variable", "grad backward requires_grad",
          "there are no gradients here: compute them from v.numpy() and bring them to sv.optimizers"),
    _word("Variable", "data detach", "write v.numpy(), and v.assign(x) to write"),
    _word("Variable", "add_ copy_ sub_", "write v.assign_add(x), v.assign(x) or v.assign_sub(x)"),
    # Checkpoints.
    _word("CheckpointManager", "latest_checkpoint", "write manager.latest"),
    _word("CheckpointManager", "restore_or_initialize restore", "write manager.restore_latest()"),
    _word("CheckpointManager", "checkpoint_interval keep_checkpoint_every_n_hours",
          "write manager.save(step) when it is time; sv.CheckpointManager(…, keep=None) keeps all"),
    _word("CheckpointManager()", "max_keep keep_n", "write keep="),
    _word("CheckpointManager()", "checkpoint_name step_counter checkpoint_interval init_fn keep_checkpoint_every_n_hours",
          "it is not here: folders are named step-…, and manager.save(step) is told the step"),
    # Data.
    _word("Dataset", "take skip",
          "write itertools.islice(dataset, 10), or dataset.at(epoch=0, position=10) to begin later"),
    _word("Dataset", "cache", "arrays are in memory already; leave it out"),
    _word("Dataset", "filter unbatch flat_map interleave zip enumerate concatenate padded_batch window",
          _METHODS_OF_TF_DATA),
    _word("Dataset", "from_tensor_slices from_tensors",
          "write sv.data.from_arrays(x, batch_size=32), or batch_size=None for single rows"),
    _word("Dataset", "from_generator list_files", "write sv.data.from_generator(fn)"),
    _word("Dataset", "AUTOTUNE", "write dataset.prefetch(2)"),
    _word("Dataset", "range", "write sv.data.from_arrays(np.arange(n), batch_size=32)"),
    _word("Dataset", "as_numpy_iterator", "write iter(dataset): its elements are NumPy arrays"),
    _word("Dataset", "cardinality", "write len(dataset)"),
    _word("Dataset", "with_options options",
          "leave it out: experimental_distribute_dataset cuts each batch, whatever the source"),
    _word("Dataset", "set_epoch", "leave it out: each iteration over the dataset is an epoch with an order of its own"),
    _word("sv.data", "from_tensor_slices from_tensors TensorDataset DataLoader",
          "write sv.data.from_arrays(x, batch_size=32), or batch_size=None for single rows"),
    _word("sv.data", "DistributedSampler", "write strategy.experimental_distribute_dataset(dataset)"),
    _word("sv.data", "AUTOTUNE", "write dataset.prefetch(2)"),
    _word("DistributedIterator", "get_next", "write next(iterator)"),
    _word("keyword", "num_parallel_calls deterministic",
          "leave it out; dataset.prefetch(2) after it reads ahead in a thread"),
    _word("keyword", "reshuffle_each_iteration",
          "leave it out: each epoch has an order of its own; dataset.at(epoch=0) reads one again"),
    _word("keyword", "num_workers", "leave it out; dataset.prefetch(2) reads ahead in a thread"),
    # Handles and groups.
    _word("Work", "Wait result synchronize get", "write work.wait(), which returns the result"),
    _word("Work", "Test test is_completed is_success poll", "write work.done()"),
    _word("Group", "Get_rank", "write group.rank"),
    _word("Group", "Get_size", "write group.size"),
    _word("Group", "Split", "write group.split(color, key)"),
    _word("Group", "Free free", "write group.destroy()"),
    _word("Group", "Exscan exscan Scan scan", "pass the group: sv.exscan(x, group=group)"),
    _word("Group", "Allreduce allreduce Bcast bcast Allgather allgather Reduce Gather Scatter "
          "Alltoall alltoall Barrier Send Recv isend Isend irecv Irecv Sendrecv sendrecv",
          "pass the group to the function of sv: sv.all_reduce(x, group=group), and so the others"),
    _word("Group", "Dup Clone", "write sv.new_group(members)"),
    _word("Group", "Create_cart",
          "write sv.mesh((2, 2), ('row', 'column')); mesh.row and mesh.column are groups"),
    _word("Group", "Abort", "raise an exception: the launcher then ends the other ranks"),
    _word("Group", "all_reduce broadcast all_gather reduce gather scatter reduce_scatter all_to_all barrier send recv",
          "pass the group: sv.all_reduce(x, group=group), and so the others"),
    # Keywords of collectives.
    _word("keyword", "average", 'write op="mean"'),
    _word("keyword", "root_rank", "write root="),
    _word("send()", "dst target", "write dest="),
    _word("recv()", "src dest", "write source="),
    _word("recv()", "buf tensor", "write out="),
    _word("keyword", "src dst dest", "write root="),
    _word("keyword", "sendbuf sendobj tensor obj value array", "write x as the first argument"),
    _word("keyword", "recvbuf output output_tensor tensor_list gather_list", "write out="),
    _word("keyword", "recvcounts counts splits output_split_sizes",
          "leave it out: lengths may differ between ranks, and are told by themselves"),
    _word("keyword", "process_set comm", "write group="),
    _word("keyword", "compression", "leave it out: arrays travel in their dtype, x.astype('float16') is smaller"),
    _word("keyword", "gradient_predivide_factor prescale_factor", "write prescale="),
    _word("keyword", "postscale_factor", "write postscale="),
    _word("keyword", "timeout_s timeout_seconds", "write timeout=30.0, in seconds"),
    _word("keyword", "name", "leave it out: calls are told apart by their order, which is the same on all ranks"),
    _word("run()", "np nprocs num_proc num_processes nproc num_workers n_jobs processes", "write workers="),
    _word("run()", "out stdout", 'write output="all", "first", "failed", "none" or ranks; results are returned'),
    # Ops.
    _word("op", "product", 'write "prod"'),
    _word("op", "land band", 'write "and"'),
    _word("op", "lor bor", 'write "or"'),
    _word("op", "lxor bxor", 'write "xor"'),
    _word("op", "adasum premul_sum", 'it is not here; write "mean", or "sum" with prescale='),
    # Options of torchrun, mpirun, horovodrun and srun.
    _word("option", "--machinefile -f", "write --hostfile FILE"),
    _word("option", "--host", "write -H a:2,b:2"),
    _word("option", "--nnodes --nodes --node-rank --rdzv-endpoint --rdzv-backend --rdzv-id --rdzv-conf --master-addr --master-port "
          "--local-addr", WITHOUT_SSH),
    _word("option", "--host-discovery-script --launcher", SEVERAL_HOSTS),
    _word("option", "--ssh-identity-file", "name it in ~/.ssh/config, or write --ssh 'ssh -i FILE'"),
    _word("option", "--network-interface --network-interfaces", "write --iface eth0"),
    _word("option", "--prefix", "write --remote-python PATH"),
    _word("option", "-N --npernode --ntasks-per-node --ppr -ppn", "write the number behind each host: node1 slots=4; on one host --workers 4"),
    _word("option", "--ntasks --num-proc --num-processes --num-workers --nproc --num-gpus --gpus -c",
          "write --workers 4"),
    _word("option", "--standalone", "leave it out: without --hostfile the workers are on this host"),
    _word("option", "--rank-by --bind-to --report-bindings --use-hwthread-cpus --cpu-bind",
          "write --bind cores, --bind none or --cores-per-worker 2; --dry-run shows the cores"),
    _word("option", "--cpus-per-task", "write --cores-per-worker 2"),
    _word("option", "--show-map --display-map --display-allocation", "write --dry-run"),
    _word("option", "--oversubscribe --allow-run-as-root --nooversubscribe", "leave it out: nothing forbids it"),
    _word("option", "--tag-output --merge-stderr-to-stdout", "leave it out: each line begins with its rank"),
    _word("option", "--output-filename --redirects -r --tee -t --stdout --stderr",
          "write --log-dir DIR: one file for each rank and stream"),
    _word("option", "--timestamp-output --prefix-timestamp", "write --timestamps"),
    _word("option", "--wdir --wd --chdir", "write --cwd DIR"),
    _word("option", "--genv --envall --export", "write --env NAME=VALUE, or --env NAME to copy ours"),
    _word("option", "--mca --gmca --gloo --mpi --pmi --backend", _OWN_MACHINE),
    _word("option", "--timeline-filename", "set SYNCVAR_TRACE=traces, then syncvar trace merge traces"),
    _word("option", "--autotune --fusion-threshold-mb --cycle-time-ms --cache-capacity",
          "leave it out: sv.all_reduce of a list or dict is one transfer already"),
    _word("option", "--min-np --max-np --reset-limit --elastic-timeout",
          "the number of workers stays the same; --max-restarts 3 starts all of them again"),
    _word("option", "--restarts --monitor-interval", "write --max-restarts 3; a rank's end is seen at once"),
    _word("option", "--resume",
          "the script resumes: manager.restore_latest() of sv.CheckpointManager goes on from the newest checkpoint"),
    _word("option", "--metrics --dashboard",
          "there is no such service; SYNCVAR_TRACE=traces records every call, syncvar explain and syncvar trace "
          "read it"),
    _word("option", "--check-build", "write syncvar test, which proves all collectives on real processes"),
    _word("option", "--role --log-line-prefix-template", "leave it out: all workers are alike"),
)  # fmt: skip

_PLACES = {
    "op": "op",
    "option": "option of the launcher",
    "keyword": "keyword",
    "coming-from": "`syncvar coming-from`",
}
_TEXTS = {(word.place, name): word.text for word in WORDS for name in word.names}
_OPS = {
    name: "mean" for word in WORDS if word.place == "op" and word.is_accepted for name in word.names
}


def explained(place: str, name: str) -> str:
    """Return what to write instead of a word, or an empty text where the table does not have it.

    Args:
        place: As in the table.
        name: The word. Options may be written with underscores, and with one dash for two.

    Example:
        >>> explained("CheckpointManager", "latest_checkpoint")
        'write manager.latest'
        >>> explained("option", "-node_rank") == explained("option", "--node-rank")
        True
    """
    if place == "option" and (place, name) not in _TEXTS and len(name) > 2:
        name = "--" + name.lstrip("-").replace("_", "-")
    return _TEXTS.get((place, name), "")


def missing(place: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that a module does not have.

    Args:
        place: "sv", or "sv." and a room.
        name: The attribute.
        known: Those that it has.

    Example:
        >>> missing("sv", "is_chief", [])
        AttributeError("module 'syncvar' has no attribute 'is_chief': write sv.rank() == 0")
        >>> missing("sv.optimizers", "Adamw", ["AdamW"])
        AttributeError("module 'syncvar.optimizers' has no attribute 'Adamw' (did you mean AdamW?)")
    """
    module = "syncvar" + place.removeprefix("sv")
    text = explained(place, name)
    hint = f": {text}" if text else nearest(name, known)
    # With an object Python would add a guess of its own.
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=None)


def unexpected(
    function: Callable[..., Any], foreign: Iterable[str], known: Iterable[str] = ()
) -> TypeError:
    """Return the error for keywords that a function does not have.

    Args:
        function: It, or the class that is made.
        foreign: The keywords, at least one.
        known: Those that it has and its signature does not name.

    Example:
        >>> import syncvar as sv
        >>> unexpected(sv.recv, ["src"])
        TypeError("recv() got an unexpected keyword argument 'src': write source=")
        >>> unexpected(sv.recv, ["tags"])
        TypeError("recv() got an unexpected keyword argument 'tags' (did you mean tag?)")
    """
    from inspect import signature

    name, shown = min(foreign), function.__name__
    text = explained(f"{shown}()", name) or explained("keyword", name)
    hint = f": {text}" if text else nearest(name, (*signature(function).parameters, *known))
    return TypeError(f"{shown}() got an unexpected keyword argument {name!r}{hint}")


def op_of(name: str) -> str:
    """Return the op that an accepted word means, or the word itself.

    Example:
        >>> op_of("average"), op_of("min")
        ('mean', 'min')
    """
    return _OPS.get(name, name)


def op_hint(op: Any, known: Iterable[str]) -> str:
    """Return what to write instead of something that is no op, or an empty text.

    Args:
        op: A word, or a member of another library, as ReduceOp.AVG of torch or MPI.SUM, which its last word tells.
        known: Ops that there are, in lower case.

    Example:
        >>> op_hint("MPI.SUM", ["sum", "mean"]), op_hint("ReduceOp.AVG", ["sum", "mean"]), op_hint("meen", ["sum", "mean"])
        (": write 'sum'", ": write 'mean'", ' (did you mean mean?)')
    """
    known = tuple(known)
    last = str(getattr(op, "name", op)).lower().replace("_", ".").rpartition(".")[2]
    if op_of(last) in known:
        return f": write {op_of(last)!r}"
    if text := explained("op", last):
        return f": {text}"
    return nearest(op.lower(), known) if isinstance(op, str) else ""


def object_hint(given: Any) -> str:
    """Return what to do with another library's object where a strategy is made, or an empty text.

    Args:
        given: A resolver of tf.distribute, names of devices, or a model.

    Example:
        >>> object_hint("gpu:0")
        ': one replica is one process: syncvar-launch --workers 4 says how many'
    """
    names = given if isinstance(given, list | tuple) and given else [given]
    if all(isinstance(name, str) for name in names):
        return f": {explained('keyword', 'devices')}"
    if "Resolver" in type(given).__name__:
        return f": {explained('keyword', 'cluster_resolver')}"
    if hasattr(given, "named_parameters") or hasattr(given, "trainable_variables"):
        return f": {_MODEL}"
    return ""


def group_hint(given: Any) -> str:
    """Return what to write instead of something that is no group, or an empty text.

    Example:
        >>> group_hint([0, 1])
        ': write group = sv.new_group([0, 1]), on all ranks of the world'
    """
    if isinstance(given, list | tuple | range) and all(isinstance(rank, int) for rank in given):
        return f": write group = sv.new_group({given!r:.60}), on all ranks of the world"
    if hasattr(given, "Get_rank") or type(given).__name__ in ("ProcessGroup", "ProcessSet"):
        return f": {explained('sv', 'Comm')}"
    return object_hint(given)


def words_text() -> str:
    """Return the table in Markdown.

    Example:
        >>> print(words_text().splitlines()[2])
        | `RMSprop` | of `sv.optimizers` | accepted: it is sv.optimizers.RMSProp |
    """
    lines = ["| word | where | here |", "|---|---|---|"]
    for word in WORDS:
        names = ", ".join(f"`{name}`" for name in word.names)
        where = (
            _PLACES.get(word.place)
            or f"{'keyword of' if word.place.endswith('()') else 'of'} `{word.place}`"
        )
        text = ("accepted: " if word.is_accepted else "") + word.text
        lines.append(f"| {names} | {where} | {text} |")
    return "\n".join(lines) + "\n"
