/* Runs programs in C, exactly as syncvar/runtime/program_runner.py does in Python.
 *
 * A Run is one call of a program. It runs until it has to wait for other ranks, and then yields the
 * publication that they have to reach. It releases the GIL meanwhile.
 */
#include "native.h"

#include <errno.h>
#if defined(__linux__)
#include <sys/uio.h>
#endif

#define STREAMED_LEAST (32 << 20) /* bytes of all results that no longer fit into the caches */
#define READ_AT_ONCE (64 << 10)   /* bytes that are read through a buffer */
#define PATIENCE_LOCKED_NS 20000  /* longest wait with the GIL */

/* Read the memory of another process; return END, or the Need at which the run stops. */
static long long read_process(Py_ssize_t process, const char *there, char *into,
                              Py_ssize_t nbytes) {
#if defined(__linux__)
    char room[READ_AT_ONCE + PAGE];
    /* The kernel copies by string instructions: where they are slow, read into a buffer first. */
    const int goes_aside = is_slow_by_string(into, there) && nbytes >= PAGE;
    char *const aside = room + ((uintptr_t)there - (uintptr_t)room) % PAGE;
    while (nbytes > 0) {
        char *const first = goes_aside ? aside : into;
        const size_t most = goes_aside && nbytes > READ_AT_ONCE ? READ_AT_ONCE : (size_t)nbytes;
        struct iovec here = {first, most}, remote = {(void *)there, most};
        const ssize_t done = process_vm_readv((pid_t)process, &here, 1, &remote, 1, 0);
        if (done <= 0) return done < 0 && errno == ESRCH ? PEER_ENDED : UNREAD;
        if (goes_aside) copy_bytes(into, first, (size_t)done);
        into += done;
        there += done;
        nbytes -= done;
    }
    return END;
#else
    (void)process, (void)there, (void)into;
    return nbytes > 0 ? UNREAD : END;
#endif
}

/* Run to a place of the code; return what the run needs first (see Need), or END. It needs no GIL.
 */
long long advance_run(Run *self, Py_ssize_t end) {
    const Program *program = self->program;
    ChannelState *channel = self->channel;
    const Py_ssize_t width = program->arithmetic.width;
    const Bound *const bound = self->bound;
    const char *terms[RANKS_MAX];
    while (self->place < end) {
        const int64_t *step = program->code + self->place;
        switch (*step) {
        case COPY:
        case STORE: {
            const Named *named = &program->named[step[3]];
            char *target = bound[step[3]].at + step[4] * width;
            const char *source = bound[step[1]].at + step[2] * width;
            const Py_ssize_t nbytes = step[5] * width;
            if (bound[step[1]].process != 0) {
                const long long failed =
                    read_process(bound[step[1]].process, source, target, nbytes);
                if (failed != END) return failed;
            } else if (*step == STORE && program->apply.loop != NULL) {
                combine(&program->apply, target, source, width, target, step[5], width);
            } else if (named->kind > SCRATCH) { /* memory that other ranks read */
                copy_out(&channel->stores, target, source, nbytes);
            } else if (named->kind == TARGET && named->nbytes * channel->size >= STREAMED_LEAST &&
                       are_apart(target, source, (size_t)nbytes)) {
                copy_past(target, source, nbytes);
            } else {
                copy_in(target, source, (size_t)nbytes);
            }
            self->place += 6;
            break;
        }
        case COMBINE:
            for (int64_t term = 0; term < step[4]; term++)
                terms[term] = bound[step[5 + 2 * term]].at + step[6 + 2 * term] * width;
            fold_terms(&program->arithmetic, NULL, terms, (int)step[4],
                       bound[step[1]].at + step[2] * width, step[3]);
            self->place += 5 + 2 * step[4];
            break;
        case PUBLISH:
            channel->phase += 1;
            store(channel->words + channel->entry + channel->phase_at, (uint64_t)channel->phase);
            self->place += 1;
            break;
        default: {
            const long long need = step[1] - channel->phase;
            if (need < 0 && !wait_for_others(channel, need,
                                             self->keeps_lock ? PATIENCE_LOCKED_NS : PATIENCE_NS))
                return need;
            self->place += 2;
        }
        }
    }
    return END;
}

/* Make a run that serves all programs of at most so many memories and scratch bytes. */
Run *new_run(Program *program, ChannelState *channel, PyObject *arrays, int keeps_lock,
             int memories, int64_t scratch_bytes) {
    Run *self = new_object(run_type);
    if (self == NULL) return NULL;
    self->bound = new_room(&self->kept_bound, memories * sizeof *self->bound);
    if (scratch_bytes) self->scratch = new_room(&self->kept_scratch, scratch_bytes);
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    memset(self->bound, 0, memories * sizeof *self->bound);
    self->program = (Program *)Py_NewRef((PyObject *)program);
    self->channel = (ChannelState *)Py_NewRef((PyObject *)channel);
    self->arrays = Py_NewRef(arrays);
    self->keeps_lock = keeps_lock;
    return self;
}

/* Return the address of a memory of one long vector, from the published words of all ranks; NULL if
 * it is not within shared memory. */
static char *find_memory(const ChannelState *channel, int kind, int rank, int place, int64_t nbytes,
                         const uint64_t *sources, const uint64_t *targets, int moves_blocks) {
    uint64_t offset;
    if (rank < 0 || rank >= channel->size) return NULL;
    if (kind == PEER_SOURCE) {
        offset = sources[rank] >> 1;
    } else if (kind == PEER_TARGET) {
        offset = targets[rank];
    } else {
        const uint64_t base = seen(channel->words + entry_of(channel, rank) + channel->segments_at);
        if (base == 0 || place < 0 || place > 1) return NULL;
        const uint64_t location = sources[rank], start = moves_blocks || location & AT_PAGE
                                                             ? (location & ~AT_PAGE) >> 1
                                                             : 0; /* first page of the cells */
        if (kind == CELLS &&
            (start > (uint64_t)channel->segment_bytes / PAGE ||
             !is_within((Py_ssize_t)(start * PAGE), nbytes, channel->segment_bytes)))
            return NULL;
        offset = kind == CELLS ? base +
                                     ((sources[rank] & 1) ^ (uint64_t)place) *
                                         (uint64_t)channel->segment_bytes +
                                     start * PAGE
                               : base + 2 * (uint64_t)channel->segment_bytes +
                                     (uint64_t)place * (uint64_t)channel->part_bytes;
    }
    if (offset == 0 || offset > (uint64_t)channel->memory.len) return NULL;
    return is_within((Py_ssize_t)offset, nbytes, channel->memory.len)
               ? (char *)channel->memory.buf + offset
               : NULL;
}

/* Find a block at the location that its rank has published with phase 0: in shared memory, or in
 * the rank's process. */
static int find_block(const ChannelState *channel, int rank, int place, int64_t nbytes,
                      Bound *found) {
    if (rank < 0 || rank >= channel->size || place < 0 || place >= RANKS_MAX) return 0;
    const char *memory = channel->memory.buf;
    const uint64_t location = ((const uint64_t *)(memory + channel->slots[rank] +
                                                  channel->side * channel->side_bytes))[place];
    if (location & ADDRESS) {
        *found = (Bound){(char *)(location ^ ADDRESS), channel->processes[rank]};
        return found->process != 0;
    }
    *found = (Bound){(char *)memory + location, 0};
    return location != 0 && location <= (uint64_t)channel->memory.len &&
           is_within((Py_ssize_t)location, nbytes, channel->memory.len);
}

/* Find the memories of a program for `count` input and output arrays. Without `targets` only this
 * rank's own memories are known. If ranks publish locations of blocks (`moves_blocks`), `sources`
 * has the sides of their cells. */
int bind_vector(Run *self, const Span *input, const Span *output, int count,
                const uint64_t *sources, const uint64_t *targets, int moves_blocks) {
    const Program *program = self->program;
    for (int memory = 0; memory < program->memories; memory++) {
        const int kind = program->named[memory].kind, rank = program->named[memory].rank,
                  place = program->named[memory].place;
        const int64_t nbytes = program->named[memory].nbytes;
        char **at = &self->bound[memory].at;
        if (kind == SOURCE || kind == TARGET) {
            const Span *const span = (kind == SOURCE ? input : output) + place;
            *at = place < 0 || place >= count || nbytes > span->nbytes ? NULL : span->at;
        } else if (kind == SCRATCH) {
            *at = self->scratch;
        } else if (targets == NULL && rank != self->channel->rank) {
            continue;
        } else if (kind == PEER_SOURCE && moves_blocks) {
            if (!find_block(self->channel, rank, place, nbytes, &self->bound[memory])) return 0;
            if (self->bound[memory].process && program->arithmetic.fold.loop != NULL)
                return 0; /* operands must be in this process */
        } else {
            *at = find_memory(self->channel, kind, rank, place, nbytes, sources, targets,
                              moves_blocks);
        }
        if (*at == NULL) return 0;
    }
    return 1;
}

/* Return whether all memories of the opening are known. */
static int is_opening_bound(const Run *self) {
    const Program *program = self->program;
    for (Py_ssize_t place = 0; place < program->opening; place += 6) {
        const int64_t *step = program->code + place;
        if (self->bound[step[1]].at == NULL || self->bound[step[3]].at == NULL) return 0;
    }
    return 1;
}

/* Find one memory: an array, or with an offset other than -1 a location in shared memory or in the
 * process of its rank. Return its size in bytes, or -1 if it cannot be used, with or without an
 * exception. */
static Py_ssize_t bind_given(const Run *self, int memory, Py_ssize_t offset, PyObject *given) {
    const Program *program = self->program;
    const ChannelState *channel = self->channel;
    const Named *named = &program->named[memory];
    Bound *bound = &self->bound[memory];
    if (offset >= (Py_ssize_t)ADDRESS) { /* operands must be in this process: */
        if (named->kind != PEER_SOURCE || program->arithmetic.fold.loop != NULL ||
            program->apply.loop != NULL || named->rank < 0 || named->rank >= channel->size ||
            channel->processes[named->rank] == 0)
            return -1;
        *bound = (Bound){(char *)(offset - (Py_ssize_t)ADDRESS), channel->processes[named->rank]};
        return named->nbytes;
    }
    if (offset >= 0) {
        bound->at = (char *)channel->memory.buf + offset;
        return channel->memory.len - offset;
    }
    if (!PyObject_TypeCheck(given, (PyTypeObject *)array_type)) return -1;
    const Array *array = (const Array *)given;
    PyObject *nbytes = PyObject_GetAttrString(given, "nbytes");
    const Py_ssize_t room = nbytes == NULL ? -1 : PyLong_AsSsize_t(nbytes);
    Py_XDECREF(nbytes);
    bound->at = array->data;
    return (array->flags & (IN_ONE_PIECE | ALIGNED)) == (IN_ONE_PIECE | ALIGNED) ? room : -1;
}

/* Run to a place of the code, with or without the GIL. */
static long long advance_to(Run *self, Py_ssize_t end) {
    if (self->keeps_lock) return advance_run(self, end);
    long long need;
    Py_BEGIN_ALLOW_THREADS
        need = advance_run(self, end);
    Py_END_ALLOW_THREADS
    return need;
}

static PyObject *run_next(PyObject *object) {
    Run *self = (Run *)object;
    const long long need = advance_to(self, self->program->length);
    return need == END ? NULL : PyLong_FromLongLong(need);
}

/* Run(program, channel, arrays, offsets, keeps_lock, opens): memory k is arrays[k] if offsets[k] is
 * -1, else at that offset of shared memory. With `opens`, the constructor runs the opening, and the
 * run does nothing else: arrays[k] may be None for memories that the opening does not use. */
static PyObject *run_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *program, *channel, *arrays, *offsets;
    int keeps_lock, opens;
    (void)type;
    if (keywords != NULL ||
        !PyArg_ParseTuple(arguments, "O!O!O!Opp", program_type, &program, channel_state_type,
                          &channel, &PyTuple_Type, &arrays, &offsets, &keeps_lock, &opens))
        return NULL;
    const Program *checked = (const Program *)program;
    if (!((ChannelState *)channel)->is_bound || PyTuple_Size(offsets) != checked->memories ||
        PyTuple_Size(arrays) != checked->memories) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a run needs an array or an offset for each memory");
        return NULL;
    }
    Run *self = new_run((Program *)program, (ChannelState *)channel, arrays, keeps_lock,
                        checked->memories, 0);
    if (self == NULL) return NULL;
    for (int memory = 0; memory < checked->memories; memory++) {
        const Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(offsets, memory));
        PyObject *array = PyTuple_GetItem(arrays, memory);
        if (PyErr_Occurred()) goto failed;
        if (opens && offset < 0 && array == Py_None) continue;
        if (bind_given(self, memory, offset, array) < checked->named[memory].nbytes) {
            PyErr_Format(PyExc_ValueError, "memory %d of a program is too short", memory);
            goto failed;
        }
    }
    self->place = checked->opening;
    if (opens) {
        if (!is_opening_bound(self)) {
            PyErr_SetString(PyExc_ValueError, "the opening uses a memory that was not passed");
            goto failed;
        }
        self->place = 0;
        advance_to(self, checked->opening);
        self->place = checked->length; /* the steps would need all memories */
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef run_members[] = {
    HOLDS(Run, program, "_program"),      HOLDS(Run, channel, "_channel"),
    HOLDS(Run, arrays, "_arrays"),        HOLDS(Run, kept_bound, "_bound"),
    HOLDS(Run, kept_scratch, "_scratch"), {NULL},
};

TYPE(Run, run, run_members, Py_TPFLAGS_HAVE_GC,
     "A call of a program: yields the publications that it has to wait for.", {Py_tp_new, run_new},
     {Py_tp_iter, PyObject_SelfIter}, {Py_tp_iternext, run_next}, HOLDING)
