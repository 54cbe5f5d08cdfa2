/* The C runner of calls of one phase in shared memory: put, publish, await, compare, combine.
 *
 * It does what syncvar/engine/prepared_reductions.py says in Python, step by step, for arrays that lie in one piece; whatever is
 * unusual it leaves to that function, before it has changed anything. Arrays are combined by NumPy's own inner loops,
 * so both runners give the same bytes. Only the limited API of CPython is used: one build serves every version
 * from 3.11 on.
 *
 * The interpreter's lock is kept: a call takes about a microsecond. What does not come soon goes on in Python.
 */
#include "native.h"

#define FORM 7          /* of what Python and this module tell each other; as in __init__.py */
#define YIELD_NS 100000 /* so long a rank gives way to others of its cores, before Python goes on */

#define LONG_PATIENCE_NS 1000000 /* the same of long vectors, without Python's lock */
#define LOOKS_AGAIN 8            /* between two times that it gives way */

/* -- what a channel knows ------------------------------------------------------------------------------------------ */

static PyMemberDef channel_state_members[] = {
    {"side", T_LONGLONG, offsetof(ChannelState, side), 0, NULL},
    {"last", T_LONGLONG, offsetof(ChannelState, last), 0, NULL},
    {"phase", T_LONGLONG, offsetof(ChannelState, phase), 0, NULL},
    {"tail", T_LONGLONG, offsetof(ChannelState, tail), 0, NULL},
    {"is_settled", T_BOOL, offsetof(ChannelState, is_settled), 0, NULL},
    {NULL},
};

/* Give back the memory of an object, and what it has held of its type. */
void release_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Return whether a rank has published a word, or, with a negative need, minus the phase of the call published last. */
static inline int is_at(const ChannelState *channel, Py_ssize_t other, long long need) {
    if (need > 0) return seen(channel, other) >= (uint64_t)need;
    return seen(channel, other + channel->phase_at) >= (uint64_t)-need ||
           (seen(channel, other) >= (uint64_t)channel->last + 2 &&
            seen(channel, other + channel->done_at) >= (uint64_t)-need);
}

/* Wait a short while until all others have published what is needed; with a patience below 0, only look. */
int have_come(const ChannelState *channel, long long need, int64_t patience_ns) {
    int64_t until = 0;
    for (int other = 0; other < channel->size - 1; other++) {
        const Py_ssize_t place = channel->others[other];
        int looks = 0;
        while (!is_at(channel, place, need)) {
            if (patience_ns < 0) return 0;
            if (++looks <= channel->looks) {
                RELAX();
                continue;
            }
            if (seen(channel, channel->abort_at)) return 0;
            const int64_t now = now_ns();
            if (until == 0) until = now + patience_ns;
            if (now >= until) return 0;
            looks = channel->looks - LOOKS_AGAIN;
            if (patience_ns > YIELD_NS || channel->shares_cores) sched_yield();
        }
    }
    return 1;
}

/* Read a tuple of numbers; returns how many, or -1. */
Py_ssize_t read_numbers(PyObject *given, Py_ssize_t *into, Py_ssize_t most) {
    const Py_ssize_t count = PyTuple_Size(given);
    if (count < 0 || count > most) {
        if (count >= 0) PyErr_Format(PyExc_ValueError, "at most %zd numbers", most);
        return -1;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        into[place] = PyLong_AsSsize_t(PyTuple_GetItem(given, place));
        if (into[place] == -1 && PyErr_Occurred()) return -1;
    }
    return count;
}

int is_within(Py_ssize_t start, Py_ssize_t nbytes, Py_ssize_t whole) {
    return start >= 0 && nbytes >= 0 && nbytes <= whole && start <= whole - nbytes;
}

/* Learn where the words of all ranks are: bind(memory, entry, fields, others, slots, side_bytes, rank, shares_cores,
 * looks, processes): processes whose memory can be read, or none. */
static PyObject *channel_state_bind(PyObject *object, PyObject *arguments) {
    ChannelState *self = (ChannelState *)object;
    PyObject *memory, *fields, *others, *slots, *sizes, *processes;
    Py_ssize_t places[7], lengths[3];
    if (self->is_bound) {
        PyErr_SetString(PyExc_ValueError, "a channel is bound once");
        return NULL;
    }
    if (!PyArg_ParseTuple(
            arguments, "OnOOOOiiiO", &memory, &self->entry, &fields, &others, &slots, &sizes, &self->rank,
            &self->shares_cores, &self->looks, &processes
        ) ||
        read_numbers(fields, places, 7) != 7 || read_numbers(sizes, lengths, 3) != 3)
        return NULL;
    self->segments_at = places[6];
    self->side_bytes = lengths[0];
    self->segment_bytes = lengths[1];
    self->part_bytes = lengths[2];
    self->check_at = places[0];
    self->phase_at = places[1];
    self->done_at = places[2];
    self->source_at = places[3];
    self->target_at = places[4];
    self->abort_at = places[5];
    self->size = (int)read_numbers(slots, self->slots, RANKS_MAX);
    if (PyErr_Occurred()) return NULL;
    const Py_ssize_t readable = read_numbers(processes, self->processes, RANKS_MAX);
    if (readable != 0 && readable != self->size) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a process of each rank, or of none");
        return NULL;
    }
    int good = self->size >= 2 && self->rank >= 0 && self->rank < self->size &&
               read_numbers(others, self->others, RANKS_MAX) == self->size - 1;
    if (!good || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a channel of 2 to 64 ranks");
        return NULL;
    }
    const Py_ssize_t entry_bytes = 8 * 16, arena = self->memory.len;
    good = is_within(8 * self->entry, entry_bytes, arena) && is_within(8 * self->abort_at, 8, arena);
    for (int field = 0; field < 5; field++) good = good && is_within(8 * places[field], 16, entry_bytes);
    good = good && is_within(8 * self->segments_at, 8, entry_bytes);
    for (int other = 0; other < self->size - 1; other++)
        good = good && is_within(8 * self->others[other], entry_bytes, arena);
    for (int rank = 0; rank < self->size; rank++)
        good = good && is_within(self->slots[rank], 2 * self->side_bytes, arena);
    if (!good) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "a channel would use memory outside the arena");
        return NULL;
    }
    self->words = self->memory.buf;
    self->is_bound = 1;
    Py_RETURN_NONE;
}

static void channel_state_dealloc(PyObject *object) {
    ChannelState *self = (ChannelState *)object;
    if (self->is_bound) PyBuffer_Release(&self->memory);
    release_object(object);
}

static PyMethodDef channel_state_methods[] = {
    {"bind", channel_state_bind, METH_VARARGS, "Learn where the words of all ranks are, for the C runner."},
    {NULL},
};

static PyType_Slot channel_state_slots[] = {
    {Py_tp_members, channel_state_members},
    {Py_tp_methods, channel_state_methods},
    {Py_tp_dealloc, channel_state_dealloc},
    {Py_tp_doc, "What a rank has published last in a group, and whether everyone has reached it."},
    {0, NULL},
};

static PyType_Spec channel_state_spec = {
    "syncvar.kernel.native.ChannelState",     sizeof(ChannelState), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, channel_state_slots,
};

/* -- NumPy's inner loops ------------------------------------------------------------------------------------------- */

/* The beginning of NumPy's PyUFuncObject, which its C interface has kept since version 1. */
typedef struct {
    PyObject_HEAD int nin, nout, nargs, identity;
    Loop *functions;
    void *const *data;
    int ntypes;
    int reserved;
    const char *name;
    const char *types;
} Ufunc;

/* Find the loop of a ufunc that takes two operands of a type to a result of the same type. */
int find_loop(PyObject *ufunc, int number, Step *found) {
    const Ufunc *head = (const Ufunc *)ufunc;
    for (int place = 0; place < head->ntypes; place++) {
        const char *types = head->types + 3 * place;
        if (types[0] == number && types[1] == number && types[2] == number) {
            found->loop = head->functions[place];
            found->data = head->data == NULL ? NULL : head->data[place];
            Py_XDECREF(found->owner);
            found->owner = Py_NewRef(ufunc);
            return found->loop != NULL;
        }
    }
    return 0;
}

struct Entrance;

PyTypeObject *channel_state_type;

/* -- a prepared call ----------------------------------------------------------------------------------------------- */

/* What is copied: from what this rank brings into its slot, or from somewhere into the result. */
typedef struct {
    Py_ssize_t from, to, nbytes, rank; /* whose slot it comes from; -1 for what this rank brings */
} Copy;

#define PATTERNS 4
#define RING_SLOTS 32 /* of a rank's, that take turns; as in channels.py */

/* What is done with long vectors that lie in some way. */
typedef struct {
    uint64_t sources;        /* ranks whose vector lies in the arena, as bits */
    int into_all, by_owners; /* all targets lie there; a target is its source */
    int last_side;           /* of the cells, see program.py; -1 where none is written */
    Program *program;
} Known;

typedef struct {
    PyObject_HEAD ChannelState *channel;
    PyObject *engine, *communicator, *busy, *queue, *add, *told, *array_type, *make, *make_arguments, *plain, *later,
        *hand_over, *interrupt, *saying, *prepared_calls, *begun, *work, *adopt;
    struct Entrance *entrance; /* where it is remembered, if anywhere */
    Form brought, made;
    Copy puts[RANKS_MAX], takes[RANKS_MAX + 1], terms[RANKS_MAX];
    int put_count, take_count, term_count;
    uint64_t digest, detail;
    int tells;
    Py_ssize_t ring; /* where the slots that take turns begin; 0 where there are none; -1 of a call that does not look for them */
    Arithmetic how;
    Step apply;
    Known known[PATTERNS]; /* of a long vector: what is done, by where the vectors lie; the first one brings all of them
                            */
    int is_long;
    PyObject *crowd; /* knows whether Python's lock has to be kept */
} SlotCall;

static PyObject *name_is_quiet, *name_locked, *name_next_call, *name_acquire, *name_release, *name_is_alert,
    *name_append, *name_remove;

static int is_fitting(const SlotCall *self, const Form *form, PyObject *value, int flags) {
    if ((PyObject *)Py_TYPE(value) != self->array_type) return 0;
    const Array *array = (const Array *)value;
    if (array->dtype != form->dtype || array->ndim != form->ndim || (array->flags & flags) != flags) return 0;
    for (int axis = 0; axis < form->ndim; axis++)
        if (array->shape[axis] != form->shape[axis]) return 0;
    return 1;
}

/* Return whether the result is made of what has been put into slots, and of nothing else. */
static int are_all_put(const SlotCall *self) {
    int all = self->take_count == 0 && !self->is_long;
    for (int term = 0; term < self->term_count; term++) all = all && self->terms[term].rank >= 0;
    return all;
}

/* Return whether a result may be written while parts of what is brought are still to be read. */
static int lie_apart(const SlotCall *self, PyObject *x, PyObject *out) {
    const char *brought = ((Array *)x)->data, *made = ((Array *)out)->data;
    if (self->is_long && brought == made) return 1;
    return are_all_put(self) || (x == out && self->term_count == 0) || brought + self->brought.nbytes <= made ||
           made + self->made.nbytes <= brought;
}

/* Return where the slot of a rank lies that it has published on a side. */
static const char *slot_of(const SlotCall *self, int rank, int side) {
    const ChannelState *channel = self->channel;
    const char *memory = channel->memory.buf;
    if (self->ring >= 0) {
        const uint64_t told = seen(channel, entry_of(channel, rank) + channel->target_at + side);
        if (told && told <= (uint64_t)channel->memory.len && is_within((Py_ssize_t)told, self->made.nbytes, channel->memory.len))
            return memory + told;
    }
    return memory + channel->slots[rank] + side * channel->side_bytes;
}

static const char *place_in(const SlotCall *self, const Copy *copy, int side, const char *brought) {
    return (copy->rank < 0 ? brought : slot_of(self, copy->rank, side)) + copy->from;
}

/* Return whether what this rank brings may be read instead of its slot: as a whole, it is put there as it is, and the
 * result does not cover up what is still to be read. */
static int reads_brought(const SlotCall *self, const char *brought, const char *out) {
    const Py_ssize_t nbytes = self->made.nbytes;
    return self->ring >= 0 && brought != NULL && (brought == out || brought + nbytes <= out || out + nbytes <= brought);
}

/* Combine the terms into the result, or apply the combination to it. */
static void combine_terms(const SlotCall *self, int side, const char *brought, char *out) {
    const char *terms[RANKS_MAX];
    for (int term = 0; term < self->term_count; term++)
        terms[term] = self->terms[term].rank == self->channel->rank && reads_brought(self, brought, out)
                          ? brought
                          : place_in(self, &self->terms[term], side, brought);
    if (self->apply.loop == NULL) {
        fold_terms(&self->how, terms, self->term_count, out, self->made.nbytes);
        return;
    }
    _Alignas(64) char made[BLOCK];
    for (Py_ssize_t start = 0; start < self->made.nbytes; start += BLOCK) {
        const Py_ssize_t left = self->made.nbytes - start, nbytes = left < BLOCK ? left : BLOCK;
        fold_terms(&self->how, terms, self->term_count, made, nbytes);
        combine(
            &self->apply, out + start, made, self->how.width, out + start, nbytes / self->how.width, self->how.width
        );
        for (int term = 0; term < self->term_count; term++) terms[term] += BLOCK;
    }
}

/* Make the result of a call on which all ranks agree. */
static void finish(const SlotCall *self, int side, const char *brought, char *out) {
    for (int take = 0; take < self->take_count; take++)
        memmove(
            out + self->takes[take].to, place_in(self, &self->takes[take], side, brought), self->takes[take].nbytes
        );
    if (self->term_count) combine_terms(self, side, brought, out);
}

/* Return 1 for True, 0 for anything else, also an attribute that is missing. */
static int is_true(PyObject *owner, PyObject *name) {
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(value);
    return value == Py_True;
}

/* Let other threads into the group's calls again. */
static void release(const SlotCall *self) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *released = PyObject_CallMethodObjArgs(self->busy, name_release, NULL);
    if (released == NULL) PyErr_Clear();
    Py_XDECREF(released);
    PyErr_Restore(type, error, trace);
}

/* Break the generation: the error that is set has left a call that others take part in. */
static void interrupt_call(SlotCall *self, PyObject *number, PyObject *begin, PyObject *said) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(self->interrupt, number, begin, error, said, NULL);
    if (done == NULL) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* Let Python go on with a call that has been published: it waits longer, and knows what else there is.
 *
 * `later` returns the result, or a generator where the engine has to go on. An error in it has left a call that others
 * take part in, wherever a signal may have struck. */
static PyObject *hand_on(
    SlotCall *self, PyObject *number, PyObject *begin, PyObject *x, PyObject *out, PyObject *made, PyObject *said,
    PyObject *timeout, PyObject *run
) {
    PyObject *taken =
        self->is_long ? Py_NewRef(Py_None) : PyObject_CallMethodObjArgs(self->busy, name_acquire, Py_False, NULL);
    PyObject *told =
        taken == NULL ? NULL
                      : PyObject_CallFunctionObjArgs(self->later, number, begin, x, out, made, said, run, self, NULL);
    PyObject *result = NULL;
    if (told == NULL) {
        interrupt_call(self, number, begin, said);
    } else if (PyTuple_GetItem(told, 0) == Py_True) {
        result = Py_NewRef(PyTuple_GetItem(told, 1));
    } else {
        result =
            PyObject_CallFunctionObjArgs(self->hand_over, number, begin, PyTuple_GetItem(told, 1), said, timeout, NULL);
    }
    Py_XDECREF(told);
    if (taken != NULL && !self->is_long) release(self);
    Py_XDECREF(taken);
    return result;
}

/* Add a call that is over to the flight recorder. */
static int record(const SlotCall *self, PyObject *told, PyObject *number, PyObject *begin) {
    PyObject *entry = PyTuple_New(5), *end = PyLong_FromLongLong(now_ns()),
             *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    if (entry == NULL || end == NULL || thread == NULL) {
        Py_XDECREF(entry);
        Py_XDECREF(end);
        Py_XDECREF(thread);
        return -1;
    }
    PyTuple_SetItem(entry, 0, Py_NewRef(told));
    PyTuple_SetItem(entry, 1, Py_NewRef(number));
    PyTuple_SetItem(entry, 2, Py_NewRef(begin));
    PyTuple_SetItem(entry, 3, end);
    PyTuple_SetItem(entry, 4, thread);
    PyObject *added = PyObject_CallFunctionObjArgs(self->add, entry, NULL);
    Py_DECREF(entry);
    Py_XDECREF(added);
    return added == NULL ? -1 : 0;
}

static int end_begun(PyObject *begun, int64_t patience_ns);

/* Return whether a call may begin now: no refusal is known, nothing is queued, nobody else is in the group's calls. */
static int may_begin(const SlotCall *self) {
    if (self->channel->begun != NULL && end_begun(self->channel->begun, 0) < 0) PyErr_Clear();
    if (!self->channel->is_settled || !is_true(self->engine, name_is_quiet) || PyObject_Size(self->queue) != 0)
        return 0;
    PyObject *locked = PyObject_CallMethodObjArgs(self->busy, name_locked, NULL);
    Py_XDECREF(locked);
    if (locked == NULL) PyErr_Clear(); /* Python will say what is wrong */
    return locked == Py_False;
}

/* Publish phase 0 of a call, on the side that has been chosen. */
static void publish_call(const SlotCall *self, long long call, uint64_t check, uint64_t source, uint64_t target) {
    ChannelState *channel = self->channel;
    const int side = (int)channel->side;
    store(channel, channel->entry + channel->check_at + side, check);
    if (self->tells || self->ring >= 0 ||
        self->is_long) { /* what differs may be the detail alone: then the others need to know the call itself */
        store(channel, channel->entry + channel->source_at + side, source);
        store(channel, channel->entry + channel->target_at + side, target);
    }
    channel->last = (call << 1) + 2;
    if (channel->phase || channel->words[channel->entry + channel->done_at]) {
        store(channel, channel->entry + channel->done_at, (uint64_t)channel->phase);
        channel->phase = 0;
        store(channel, channel->entry + channel->phase_at, 0);
    }
    store(channel, channel->entry, (uint64_t)channel->last | (uint64_t)side);
}

/* Wait for phase 0 of the others; return whether they have said the same. Who has not been given up a call says it on
 * the same side. */
static int all_agree(const SlotCall *self, uint64_t check, int64_t patience_ns) {
    const ChannelState *channel = self->channel;
    int agree = have_come(channel, channel->last, patience_ns);
    for (int other = 0; agree && other < channel->size - 1; other++)
        agree = seen(channel, channel->others[other] + channel->check_at + (int)channel->side) == check;
    return agree;
}

/* Put what this rank brings into its slot, or into the next of those that take turns; return where that is, or 0. */
static uint64_t put_own(const SlotCall *self, int side, const char *x) {
    ChannelState *channel = self->channel;
    uint64_t told = 0;
    if (self->ring > 0) {
        channel->turn = (channel->turn + 1) % RING_SLOTS;
        told = (uint64_t)(self->ring + channel->turn * channel->side_bytes);
    }
    char *own = (char *)channel->memory.buf + (told ? (Py_ssize_t)told : channel->slots[channel->rank] + side * channel->side_bytes);
    for (int put = 0; put < self->put_count; put++)
        memcpy(own + self->puts[put].to, x + self->puts[put].from, self->puts[put].nbytes);
    return told;
}

/* Make a call through the small slots; return whether all has been done. */
static int run_small(SlotCall *self, long long call, uint64_t digest, const char *x, char *made) {
    ChannelState *channel = self->channel;
    const int side = (int)(channel->side ^= 1);
    const uint64_t told = put_own(self, side, x);
    const uint64_t plain = digest + (uint64_t)call * SPREAD, check = plain + self->detail;
    publish_call(self, call, check, plain, told);
    if (!all_agree(self, check, channel->shares_cores ? YIELD_NS : 0)) return 0;
    finish(self, side, x, made);
    return 1;
}

/* Return where memory lies in the arena, or 0. */
static uint64_t offset_of(const ChannelState *channel, const char *memory) {
    const char *start = channel->memory.buf;
    return memory >= start && memory < start + channel->memory.len ? (uint64_t)(memory - start) : 0;
}

/* Find what is done with vectors that lie as all ranks have told; NULL where that is not known yet. */
static const Known *find_known(const SlotCall *self, uint64_t *sources, uint64_t *targets) {
    const ChannelState *channel = self->channel;
    const int side = (int)channel->side;
    uint64_t bits = 0;
    int into_all = 1, by_owners = 0;
    for (int distance = 0; distance < channel->size; distance++) {
        const int rank = (channel->rank + distance) % channel->size;
        const Py_ssize_t entry = distance ? channel->others[distance - 1] : channel->entry;
        sources[rank] = seen(channel, entry + channel->source_at + side);
        targets[rank] = seen(channel, entry + channel->target_at + side);
        bits |= (uint64_t)(sources[rank] > 1) << rank;
        into_all = into_all && targets[rank] != 0;
        by_owners = by_owners || (sources[rank] > 1 && sources[rank] >> 1 == targets[rank]);
    }
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
        const Known *known = &self->known[pattern];
        if (known->program != NULL && known->sources == bits && known->into_all == into_all &&
            known->by_owners == by_owners)
            return known;
    }
    return NULL;
}

enum { DONE, UNKNOWN, WAITING };

/* Make a call with a long vector, without Python's lock: DONE; or UNKNOWN, where phase 0 has been published and Python
 * has to go on; or WAITING, where the run has to go on later. */
static int run_long(SlotCall *self, Run *run, long long call, uint64_t digest, uint64_t source, char *x, char *made) {
    ChannelState *channel = self->channel;
    uint64_t sources[RANKS_MAX], targets[RANKS_MAX];
    const uint64_t check = digest + (uint64_t)call * SPREAD;
    channel->side ^= 1;
    if (source < 2) {
        advance_run(run, run->program->opening);
        channel->tail = (long long)(source & 1);
    }
    publish_call(self, call, check, source, offset_of(channel, made));
    if (!all_agree(self, check, LONG_PATIENCE_NS)) return UNKNOWN;
    const Known *known = find_known(self, sources, targets);
    if (known == NULL) return UNKNOWN;
    run->program = known->program; /* both are kept by this call; whose reference it is, is put right afterwards */
    if (!bind_vector(run, x, self->brought.nbytes, made, self->made.nbytes, sources, targets)) return UNKNOWN;
    if (known->last_side >= 0) channel->tail = (long long)(source & 1) ^ known->last_side;
    run->place = known->program->opening;
    return advance_run(run, known->program->length) ? WAITING : DONE;
}

PyObject *run_slots(PyObject *object, PyObject *x, PyObject *out, PyObject *said, PyObject *timeout) {
    SlotCall *self = (SlotCall *)object;
    ChannelState *channel = self->channel;
    PyObject *told = NULL, *made = NULL, *number = NULL, *begin = NULL, *following = NULL, *result = NULL,
             *taken = NULL;
    Run *run = NULL;
    uint64_t digest = self->digest, source = 0;

    if (!is_fitting(self, &self->brought, x, IN_ONE_PIECE | ALIGNED)) goto unusual;
    if (out != Py_None && !is_fitting(self, &self->made, out, IN_ONE_PIECE | ALIGNED | WRITEABLE)) goto unusual;
    if (out != Py_None && !lie_apart(self, x, out)) goto unusual;
    if (said == Py_None) {
        told = Py_NewRef(self->told);
    } else {
        digest = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(said, 1));
        told = PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(self->saying, said, NULL);
    }
    if (told == NULL) goto done;
    made = out == Py_None ? PyObject_Call(self->make, self->make_arguments, NULL) : Py_NewRef(out);
    if (made == NULL) goto done;
    char *const brought = ((Array *)x)->data, *const target = ((Array *)made)->data;
    if (self->is_long) {
        if (is_true(self->crowd, name_is_alert)) goto unusual;
        source = offset_of(channel, brought) << 1 | (uint64_t)(channel->tail ^ 1);
        uint64_t own[RANKS_MAX] = {0};
        own[channel->rank] = source;
        int memories = 0;
        for (int pattern = 0; pattern < PATTERNS && self->known[pattern].program != NULL; pattern++) {
            const int used = self->known[pattern].program->memories;
            memories = used > memories ? used : memories;
        }
        run = new_run(self->known[0].program, channel, Py_None, 0, memories);
        if (run == NULL) goto done;
        if (!bind_vector(run, brought, self->brought.nbytes, target, self->made.nbytes, own, NULL)) goto unusual;
    }
    /* What comes before may have run other threads, or the collector of garbage; from here on nothing does. */
    if (!may_begin(self)) goto unusual;
    if (self->is_long) {
        taken = PyObject_CallMethodObjArgs(self->busy, name_acquire, Py_False, NULL);
        if (taken == NULL) goto done;
        if (taken != Py_True) goto unusual;
    }
    number = PyObject_GetAttr(self->communicator, name_next_call);
    if (number == NULL) goto done;
    const long long call = PyLong_AsLongLong(number);
    following = call < 0 ? NULL : PyLong_FromLongLong(call + 1);
    begin = PyLong_FromLongLong(now_ns());
    if (following == NULL || begin == NULL || PyObject_SetAttr(self->communicator, name_next_call, following) < 0)
        goto done;

    /* From here to the end of the wait nothing can fail: others take part in the call now. */
    int state;
    if (self->is_long) {
        Program *const first = run->program;
        Py_BEGIN_ALLOW_THREADS state = run_long(self, run, call, digest, source, brought, target);
        Py_END_ALLOW_THREADS Py_INCREF((PyObject *)run->program);
        Py_DECREF((PyObject *)first);
    } else {
        state = run_small(self, call, digest, brought, target) ? DONE : UNKNOWN;
    }
    if (state != DONE)
        result =
            hand_on(self, number, begin, x, out, made, said, timeout, state == WAITING ? (PyObject *)run : Py_None);
    else if (record(self, told, number, begin) == 0)
        result = Py_NewRef(made);
done:
    if (taken == Py_True) release(self);
    Py_XDECREF(taken);
    Py_XDECREF(told);
    Py_XDECREF(made);
    Py_XDECREF(number);
    Py_XDECREF(begin);
    Py_XDECREF(following);
    Py_XDECREF((PyObject *)run);
    return result;

unusual:
    result = PyObject_CallFunctionObjArgs(self->plain, x, out, said, timeout, NULL);
    goto done;
}

/* Learn what is done with long vectors that lie in some way: learn(sources, into_all, by_owners, last_side, program);
 * the first time, where all are brought. */
static PyObject *slot_call_learn(PyObject *object, PyObject *arguments) {
    SlotCall *self = (SlotCall *)object;
    Known found = {0};
    unsigned long long sources;
    if (!PyArg_ParseTuple(
            arguments, "KppiO!", &sources, &found.into_all, &found.by_owners, &found.last_side, program_type,
            &found.program
        ))
        return NULL;
    found.sources = sources;
    int pattern = 0;
    while (pattern < PATTERNS - 1 && self->known[pattern].program != NULL) pattern++;
    if (self->known[pattern].program != NULL) Py_RETURN_NONE; /* so many ways do */
    Py_INCREF((PyObject *)found.program);
    self->known[pattern] = found;
    Py_RETURN_NONE;
}

static PyObject *slot_call_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t given = PyTuple_Size(arguments);
    if (given < 2 || given > 4 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "a prepared call takes (x, out, said, timeout)");
        return NULL;
    }
    PyObject *said = given > 2 ? PyTuple_GetItem(arguments, 2) : Py_None,
             *timeout = given > 3 ? PyTuple_GetItem(arguments, 3) : Py_None;
    return run_slots(object, PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1), said, timeout);
}

/* -- a call that has begun, and is waited for later --------------------------------------------------------------- */

enum { UNPUBLISHED, BEGUN, ENDED, ADOPTED };

/* While it is BEGUN it is the only entry of the channel's queue: nobody publishes before it has ended, or the engine has
 * adopted it. */
typedef struct {
    PyObject_HEAD SlotCall *call;
    PyObject *number, *begin, *timeout, *made, *site, *instruction, *operation;
    uint64_t check;
    int state;
} Begun;

static PyTypeObject *begun_type;

static int call_one(PyObject *owner, PyObject *name, PyObject *argument) {
    PyObject *done = PyObject_CallMethodObjArgs(owner, name, argument, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Take a call out of the lists of those that are to be ended; an error that is set stays. */
static void withdraw(Begun *self) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (call_one(self->call->queue, name_remove, (PyObject *)self) < 0) PyErr_Clear(); /* it is not there */
    if (call_one(self->call->begun, name_remove, (PyObject *)self) < 0) PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

/* End a call that has begun if the others have come, or come soon: 1; 0 where it has to go on; -1 with an error. */
static int end_begun(PyObject *object, int64_t patience_ns) {
    Begun *self = (Begun *)object;
    if (self->state == ENDED) return 1;
    if (self->state != BEGUN || !is_true(self->call->engine, name_is_quiet)) return 0;
    SlotCall *call = self->call;
    if (patience_ns == 0 && call->channel->shares_cores) patience_ns = YIELD_NS;
    if (!is_fitting(call, &call->made, self->made, IN_ONE_PIECE | ALIGNED | WRITEABLE)) return 0; /* any more */
    if (!all_agree(call, self->check, patience_ns)) return 0;
    finish(call, (int)call->channel->side, NULL, ((Array *)self->made)->data);
    self->state = ENDED;
    call->channel->begun = NULL;
    Py_INCREF(object); /* its lists may be all that keep it */
    withdraw(self);
    const int recorded = record(call, call->told, self->number, self->begin);
    Py_DECREF(object);
    return recorded < 0 ? -1 : 1;
}

/* Begin a call that is waited for later; returns what waits for it, or None where nothing has been done. What this rank
 * brings is taken now. */
static PyObject *begin_slots(
    SlotCall *self, PyObject *x, PyObject *out, PyObject *timeout, PyObject *site, PyObject *instruction
) {
    ChannelState *channel = self->channel;
    if (self->adopt == Py_None || !is_fitting(self, &self->brought, x, IN_ONE_PIECE | ALIGNED) ||
        (out != Py_None && !is_fitting(self, &self->made, out, IN_ONE_PIECE | ALIGNED | WRITEABLE)))
        Py_RETURN_NONE;
    allocfunc allocate = (allocfunc)PyType_GetSlot(begun_type, Py_tp_alloc);
    Begun *begun = (Begun *)allocate(begun_type, 0);
    if (begun == NULL) return NULL;
    PyObject *following = NULL, *work = NULL;
    int taken = 0;
    begun->call = (SlotCall *)Py_NewRef((PyObject *)self);
    begun->timeout = Py_NewRef(timeout);
    begun->site = Py_NewRef(site);
    begun->instruction = Py_NewRef(instruction);
    begun->made = out == Py_None ? PyObject_Call(self->make, self->make_arguments, NULL) : Py_NewRef(out);
    if (begun->made == NULL) goto done;
    work = PyObject_CallFunctionObjArgs(self->work, self->engine, begun, NULL);
    begun->begin = PyLong_FromLongLong(now_ns());
    if (work == NULL || begun->begin == NULL) goto done;
    /* What comes before may have run other threads, or the collector of garbage; from here on nothing does. */
    if (!may_begin(self)) goto done;
    taken = 1;
    begun->number = PyObject_GetAttr(self->communicator, name_next_call);
    const long long call = begun->number == NULL ? -1 : PyLong_AsLongLong(begun->number);
    following = call < 0 ? NULL : PyLong_FromLongLong(call + 1);
    if (following == NULL || call_one(self->begun, name_append, (PyObject *)begun) < 0) goto done;
    if (call_one(self->queue, name_append, (PyObject *)begun) < 0 ||
        PyObject_SetAttr(self->communicator, name_next_call, following) < 0)
        goto done;
    const int side = (int)(channel->side ^= 1);
    const uint64_t told = put_own(self, side, ((Array *)x)->data);
    begun->check = self->digest + (uint64_t)call * SPREAD + self->detail;
    begun->state = BEGUN;
    channel->begun = (PyObject *)begun;
    publish_call(self, call, begun->check, begun->check - self->detail, told);
done:
    if (PyErr_Occurred()) {
        Py_CLEAR(work);
        if (taken) withdraw(begun);
    }
    if (work != NULL && !taken) {
        Py_DECREF(work);
        work = Py_NewRef(Py_None);
    }
    Py_XDECREF(following);
    Py_DECREF(begun);
    return work;
}

/* begin(x, out, timeout, site): see begin_slots; `site` is the place in the program, in words. */
static PyObject *slot_call_begin(PyObject *object, PyObject *arguments) {
    PyObject *x, *out, *timeout, *site;
    if (!PyArg_ParseTuple(arguments, "OOOO", &x, &out, &timeout, &site)) return NULL;
    return begin_slots((SlotCall *)object, x, out, timeout, site, Py_None);
}

static PyObject *begun_end(PyObject *object, PyObject *arguments) {
    int waits;
    if (!PyArg_ParseTuple(arguments, "p", &waits)) return NULL;
    const int ended = end_begun(object, waits ? 0 : -1);
    return ended < 0 ? NULL : Py_NewRef(ended ? ((Begun *)object)->made : Py_None);
}

/* Let the engine go on with it. Others wait for that where they would queue a call of the group: its caller has a lock. */
static PyObject *begun_adopt(PyObject *object, PyObject *unused) {
    (void)unused;
    Begun *self = (Begun *)object;
    if (self->state != BEGUN) Py_RETURN_NONE;
    SlotCall *call = self->call;
    self->state = ADOPTED;
    call->channel->begun = NULL;
    Py_INCREF(object);
    self->operation = PyObject_CallFunctionObjArgs(
        call->adopt, self->number, self->begin, self->made, self->timeout, self->site, self->instruction, NULL
    );
    if (self->operation == NULL) interrupt_call(call, self->number, self->begin, Py_None);
    withdraw(self);
    Py_DECREF(object);
    return self->operation == NULL ? NULL : Py_NewRef(Py_None);
}

static PyObject *begun_is_over(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(((Begun *)object)->state == ENDED);
}

static PyObject **begun_references(PyObject *object, int place) {
    Begun *self = (Begun *)object;
    PyObject **all[] = {(PyObject **)&self->call, &self->number,      &self->begin,     &self->timeout, &self->made,
                        &self->site,              &self->instruction, &self->operation};
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int begun_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, begun_references, visit, arg);
}

static int begun_clear(PyObject *object) {
    Begun *self = (Begun *)object;
    if (self->state == BEGUN && self->call->channel != NULL) self->call->channel->begun = NULL;
    self->state = ADOPTED;
    clear_all(object, begun_references);
    return 0;
}

static void begun_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    begun_clear(object);
    release_object(object);
}

static PyMemberDef begun_members[] = {
    {"operation", T_OBJECT, offsetof(Begun, operation), READONLY, NULL},
    {"begin", T_OBJECT, offsetof(Begun, begin), READONLY, NULL},
    {NULL},
};

static PyGetSetDef begun_getters[] = {{"is_over", begun_is_over, NULL, NULL, NULL}, {NULL}};

static PyMethodDef begun_methods[] = {
    {"end", begun_end, METH_VARARGS, "Return the result if it is there, or, end(True), comes soon; else None."},
    {"adopt", begun_adopt, METH_NOARGS, "Let the engine go on with it, as `operation`; nothing where it has ended."},
    {NULL},
};

static PyType_Slot begun_slots[] = {
    {Py_tp_members, begun_members},   {Py_tp_getset, begun_getters}, {Py_tp_methods, begun_methods},
    {Py_tp_traverse, begun_traverse}, {Py_tp_clear, begun_clear},    {Py_tp_dealloc, begun_dealloc},
    {Py_tp_doc, "A prepared call that has begun, and is waited for later."},
    {0, NULL},
};

static PyType_Spec begun_spec = {
    "syncvar.kernel.native.Begun", sizeof(Begun), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, begun_slots,
};

/* -- making one ---------------------------------------------------------------------------------------------------- */

static PyObject **references(PyObject *object, int place) {
    SlotCall *self = (SlotCall *)object;
    PyObject **all[] = {
        (PyObject **)&self->channel,
        &self->engine,
        &self->communicator,
        &self->busy,
        &self->queue,
        &self->add,
        &self->told,
        &self->array_type,
        &self->brought.dtype,
        &self->made.dtype,
        &self->make,
        &self->make_arguments,
        &self->plain,
        &self->later,
        &self->hand_over,
        &self->interrupt,
        &self->saying,
        &self->prepared_calls,
        &self->begun,
        &self->work,
        &self->adopt,
        &self->how.fold.owner,
        &self->how.divide.owner,
        &self->apply.owner,
        &self->crowd,
        (PyObject **)&self->known[0].program,
        (PyObject **)&self->known[1].program,
        (PyObject **)&self->known[2].program,
        (PyObject **)&self->known[3].program,
    };
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

int visit_all(PyObject *object, References references_of, visitproc visit, void *arg) {
    PyObject **found;
    Py_VISIT(Py_TYPE(object));
    for (int place = 0; (found = references_of(object, place)) != NULL; place++) Py_VISIT(*found);
    return 0;
}

void clear_all(PyObject *object, References references_of) {
    PyObject **found;
    for (int place = 0; (found = references_of(object, place)) != NULL; place++) Py_CLEAR(*found);
}

static int slot_call_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, references, visit, arg);
}

static void forget(SlotCall *call);

static int slot_call_clear(PyObject *object) {
    forget((SlotCall *)object);
    clear_all(object, references);
    return 0;
}

static void slot_call_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    slot_call_clear(object);
    release_object(object);
}

/* Read tuples (from, to, nbytes, rank); returns how many, or -1. */
static int read_copies(PyObject *given, Copy *into, Py_ssize_t most) {
    const Py_ssize_t count = PyTuple_Size(given);
    if (count > most) PyErr_Format(PyExc_ValueError, "at most %zd copies", most);
    if (count < 0 || count > most) return -1;
    for (Py_ssize_t place = 0; place < count; place++) {
        Py_ssize_t numbers[4];
        if (read_numbers(PyTuple_GetItem(given, place), numbers, 4) != 4) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a copy is (from, to, nbytes, rank)");
            return -1;
        }
        into[place] = (Copy){numbers[0], numbers[1], numbers[2], numbers[3]};
    }
    return (int)count;
}

/* Read (dtype, shape). */
int read_form(PyObject *given, Form *form) {
    PyObject *dtype, *shape;
    Py_ssize_t lengths[NDIM_MAX];
    if (!PyArg_ParseTuple(given, "OO", &dtype, &shape)) return 0;
    form->dtype = Py_NewRef(dtype);
    form->ndim = (int)read_numbers(shape, lengths, NDIM_MAX);
    PyObject *itemsize = form->ndim < 0 ? NULL : PyObject_GetAttrString(dtype, "itemsize");
    if (itemsize == NULL) return 0;
    form->nbytes = PyLong_AsSsize_t(itemsize);
    Py_DECREF(itemsize);
    for (int axis = 0; axis < form->ndim; axis++) {
        form->shape[axis] = lengths[axis];
        form->nbytes *= lengths[axis];
    }
    return 1;
}

/* Look whether all that a call can touch lies in the slots and in its arrays: nothing is compared later. */
static int check_places(const SlotCall *self) {
    const Py_ssize_t slot = self->channel->side_bytes, brought = self->brought.nbytes, made = self->made.nbytes;
    int good = 1;
    for (int put = 0; put < self->put_count; put++)
        good = good && is_within(self->puts[put].from, self->puts[put].nbytes, brought) &&
               is_within(self->puts[put].to, self->puts[put].nbytes, slot);
    for (int take = 0; take < self->take_count + self->term_count; take++) {
        const Copy *copy = take < self->take_count ? &self->takes[take] : &self->terms[take - self->take_count];
        good = good && copy->rank < self->channel->size &&
               is_within(copy->from, copy->nbytes, copy->rank < 0 ? brought : slot);
        good = good && is_within(copy->to, copy->nbytes, made) && (take < self->take_count || copy->nbytes == made);
    }
    if (self->ring >= 0) /* the terms are what the ranks bring, whole */
        good = good && self->put_count == 1 && self->puts[0].nbytes == brought && brought == made && !self->is_long &&
               is_within(self->ring, self->ring ? RING_SLOTS * slot : 0, self->channel->memory.len);
    if (!good) PyErr_SetString(PyExc_ValueError, "a prepared call would use memory outside its arrays or the arena");
    return good;
}

static PyObject *slot_call_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {
        "channel", "engine",  "communicator", "busy",  "queue",     "add",       "told",   "digest", "detail",
        "tells",   "brought", "made",         "puts",  "takes",     "terms",     "fold",   "divide", "apply",
        "divisor", "make",    "plain",        "later", "hand_over", "interrupt", "saying", "crowd",
        "begun",   "work",    "adopt",        "ring",  NULL,
    };
    PyObject *channel, *engine, *communicator, *busy, *queue, *add, *told, *brought, *made, *puts, *takes, *terms;
    PyObject *fold, *divide, *apply, *make, *plain, *later, *hand_over, *interrupt, *saying, *crowd, *begun, *work, *adopt;
    const char *divisor;
    Py_ssize_t divisor_bytes;
    unsigned long long digest, detail;
    int tells;
    Py_ssize_t ring;
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "$O!OOOOOOKKpOOOOOOOOy#OOOOOOOO!OOn:SlotCall", names, channel_state_type, &channel, &engine,
            &communicator, &busy, &queue, &add, &told, &digest, &detail, &tells, &brought, &made, &puts, &takes, &terms,
            &fold, &divide, &apply, &divisor, &divisor_bytes, &make, &plain, &later, &hand_over, &interrupt, &saying,
            &crowd, &PyList_Type, &begun, &work, &adopt, &ring
        ))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    SlotCall *self = (SlotCall *)allocate(type, 0);
    if (self == NULL) return NULL;
    PyObject *numpy = NULL, *itemsize = NULL;
    self->channel = (ChannelState *)Py_NewRef(channel);
    self->engine = Py_NewRef(engine);
    self->communicator = Py_NewRef(communicator);
    self->busy = Py_NewRef(busy);
    self->queue = Py_NewRef(queue);
    self->add = Py_NewRef(add);
    self->told = Py_NewRef(told);
    self->make = Py_NewRef(make);
    self->plain = Py_NewRef(plain);
    self->later = Py_NewRef(later);
    self->hand_over = Py_NewRef(hand_over);
    self->interrupt = Py_NewRef(interrupt);
    self->saying = Py_NewRef(saying);
    self->begun = Py_NewRef(begun);
    self->work = Py_NewRef(work);
    self->adopt = Py_NewRef(adopt);
    self->digest = digest;
    self->detail = detail;
    self->tells = tells;
    self->ring = ring;
    self->is_long = crowd != Py_None;
    self->crowd = Py_NewRef(crowd);
    if (!self->channel->is_bound) goto wrong;
    if (!read_form(brought, &self->brought) || !read_form(made, &self->made)) goto failed;
    self->put_count = read_copies(puts, self->puts, RANKS_MAX);
    self->take_count = read_copies(takes, self->takes, RANKS_MAX + 1);
    self->term_count = read_copies(terms, self->terms, RANKS_MAX);
    if (self->put_count < 0 || self->take_count < 0 || self->term_count < 0) goto failed;
    itemsize = PyObject_GetAttrString(self->made.dtype, "itemsize");
    if (itemsize == NULL) goto failed;
    self->how.width = PyLong_AsSsize_t(itemsize);
    if (fold != Py_None) {
        if (self->term_count != self->channel->size ||
            !has_arithmetic(&self->how, self->made.dtype, fold, divide, divisor, divisor_bytes))
            goto wrong;
        if (apply != Py_None && !find_loop(apply, number_of(self->made.dtype), &self->apply)) goto wrong;
    } else if (self->term_count || divide != Py_None || apply != Py_None) {
        goto wrong;
    }
    if (!check_places(self)) goto failed;
    if (adopt != Py_None && (self->is_long || !are_all_put(self))) goto wrong; /* what is brought is taken at once */
    numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) goto failed;
    self->array_type = PyObject_GetAttrString(numpy, "ndarray");
    if (self->array_type == NULL) goto failed;
    self->make_arguments = PyTuple_Pack(2, PyTuple_GetItem(made, 1), PyTuple_GetItem(made, 0));
    if (self->make_arguments == NULL) goto failed;
    Py_DECREF(numpy);
    Py_DECREF(itemsize);
    return (PyObject *)self;
wrong:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this call cannot be prepared here");
failed:
    Py_XDECREF(numpy);
    Py_XDECREF(itemsize);
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef slot_call_methods[] = {
    {"learn", slot_call_learn, METH_VARARGS, "Learn what is done with long vectors that lie in some way."},
    {"begin", slot_call_begin, METH_VARARGS, "Begin a call that is waited for later: (x, out, timeout, site)."},
    {NULL},
};

static PyType_Slot slot_call_slots[] = {
    {Py_tp_new, slot_call_new},
    {Py_tp_call, slot_call_call},
    {Py_tp_dealloc, slot_call_dealloc},
    {Py_tp_traverse, slot_call_traverse},
    {Py_tp_clear, slot_call_clear},
    {Py_tp_methods, slot_call_methods},
    {Py_tp_doc, "A prepared call whose data go through the small slots of a channel: call(x, out, said, timeout)."},
    {0, NULL},
};

static PyType_Spec slot_call_spec = {
    "syncvar.kernel.native.SlotCall", sizeof(SlotCall), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slot_call_slots,
};

/* -- the entrance of a public function ----------------------------------------------------------------------------- */

static int is_float(PyObject *value) { return Py_TYPE(value) == &PyFloat_Type; }

static int is_integer(PyObject *value) { return Py_TYPE(value) == &PyLong_Type || Py_TYPE(value) == &PyBool_Type; }

#define NUMBERS_MAX 64 /* of a list that is made an array here */

/* Return whether a value is a number, or a short list or tuple of numbers of one kind: NumPy makes an array of it. */
static int are_numbers(PyObject *value) {
    if (is_float(value) || is_integer(value)) return 1;
    const int is_list = Py_TYPE(value) == &PyList_Type;
    if (!is_list && Py_TYPE(value) != &PyTuple_Type) return 0;
    const Py_ssize_t count = is_list ? PyList_Size(value) : PyTuple_Size(value);
    if (count < 1 || count > NUMBERS_MAX) return 0;
    PyTypeObject *kind = NULL;
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *item = is_list ? PyList_GetItem(value, place) : PyTuple_GetItem(value, place);
        if ((!is_float(item) && !is_integer(item)) || (kind != NULL && kind != Py_TYPE(item))) return 0;
        kind = Py_TYPE(item);
    }
    return 1;
}

#define REMEMBERED 32 /* calls, by what they are made of; of two in one place the newer one stays */

typedef struct {
    PyObject *op;
    SlotCall
        *call; /* borrowed: the group's table of prepared calls keeps it, and it takes itself out here when it goes */
} Remembered;

typedef struct Entrance {
    PyObject_HEAD PyObject *function, *state, *array_type, *as_array, *nothing, *second, *usual, *home;
    int positions; /* how many arguments may be given by position */
    Remembered calls[REMEMBERED];
} Entrance;

PyTypeObject *slot_call_type;
static PyObject *name_default, *name_is_bound, *name_prepared_calls, *name_world, *name_out, *name_timeout, *name_async_op,
    *name_filename, *name_instruction;

static unsigned place_of(PyObject *op, PyObject *dtype, int ndim, const intptr_t *shape) {
    uintptr_t mixed = ((uintptr_t)op >> 4) * 31 + ((uintptr_t)dtype >> 4);
    for (int axis = 0; axis < ndim; axis++) mixed = mixed * 1000003u + (uintptr_t)shape[axis];
    return (unsigned)((mixed ^ mixed >> 17) % REMEMBERED);
}

/* Take a call out of where it is remembered; nothing where it is not. */
static void forget(SlotCall *call) {
    if (call == NULL || call->entrance == NULL) return;
    Entrance *entrance = call->entrance;
    call->entrance = NULL;
    for (int place = 0; place < REMEMBERED; place++) {
        if (entrance->calls[place].call == call) {
            entrance->calls[place].call = NULL;
            Py_CLEAR(entrance->calls[place].op);
        }
    }
    Py_DECREF((PyObject *)entrance);
}

/* Return whether a call belongs to the job that this thread is in, and to the world as it is now. */
static int is_current(const Entrance *self, const SlotCall *call) {
    PyObject *context = PyObject_GetAttr(self->state, name_default);
    PyObject *world = context == NULL || context == Py_None ? NULL : PyObject_GetAttr(context, name_world);
    PyObject *prepared_calls = world != call->communicator ? NULL : PyObject_GetAttr(world, name_prepared_calls);
    const int same = prepared_calls != NULL && prepared_calls == call->prepared_calls && !is_true(self->state, name_is_bound);
    Py_XDECREF(context);
    Py_XDECREF(world);
    Py_XDECREF(prepared_calls);
    if (PyErr_Occurred()) PyErr_Clear();
    return same;
}

/* Begin a call that has been remembered; None where nothing has been done. The caller's place is put into words when
 * somebody asks; where it is in this package, the function has to look further. */
static PyObject *begin_remembered(Entrance *self, SlotCall *call, PyObject *array, PyObject *out, PyObject *timeout) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) Py_RETURN_NONE;
    PyObject *code = (PyObject *)PyFrame_GetCode(frame), *made = NULL;
    PyObject *instruction = PyObject_GetAttr((PyObject *)frame, name_instruction),
             *file = instruction == NULL ? NULL : PyObject_GetAttr(code, name_filename);
    const Py_ssize_t ours = file == NULL ? -1 : PyUnicode_Tailmatch(file, self->home, 0, PY_SSIZE_T_MAX, -1);
    if (ours >= 0) made = ours ? Py_NewRef(Py_None) : begin_slots(call, array, out, timeout, code, instruction);
    Py_DECREF(code);
    Py_XDECREF(instruction);
    Py_XDECREF(file);
    return made;
}

/* Run a call that has been remembered; NULL without an error where the function itself has to be called. */
static PyObject *run_remembered(Entrance *self, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t given = PyTuple_Size(arguments);
    PyObject *x = given > 0 ? PyTuple_GetItem(arguments, 0) : self->nothing,
             *op = given > 1 ? PyTuple_GetItem(arguments, 1) : self->usual;
    PyObject *out = Py_None, *timeout = Py_None;
    int later = 0;
    if (given > self->positions || (given == 0) != (self->nothing != Py_None)) return NULL;
    if (keywords != NULL) {
        PyObject *name, *value;
        Py_ssize_t place = 0;
        while (PyDict_Next(keywords, &place, &name, &value)) {
            if (name == name_out && given > 0)
                out = value;
            else if (name == self->second && given == 1)
                op = value;
            else if (name == name_timeout && (value == Py_None || (is_float(value) && PyFloat_AsDouble(value) > 0)))
                timeout = value;
            else if (name == name_async_op && PyBool_Check(value) && given > 0)
                later = value == Py_True;
            else
                return NULL;
        }
    }
    PyObject *array;
    if (are_numbers(x)) {
        array = PyObject_CallFunctionObjArgs(self->as_array, x, NULL);
        if (array == NULL) PyErr_Clear();
    } else {
        array = Py_NewRef(x);
    }
    PyObject *result = NULL;
    if (array != NULL && (PyObject *)Py_TYPE(array) == self->array_type) {
        const Array *seen_array = (const Array *)array;
        const Remembered *found = &self->calls[place_of(op, seen_array->dtype, seen_array->ndim, seen_array->shape)];
        if (found->call != NULL && found->op == op && is_fitting(found->call, &found->call->brought, array, 0) &&
            is_current(self, found->call)) {
            SlotCall *call = (SlotCall *)Py_NewRef((PyObject *)found->call);
            result = later ? begin_remembered(self, call, array, out, timeout)
                           : run_slots((PyObject *)call, array, out, Py_None, timeout);
            Py_DECREF(call);
            if (result == Py_None) Py_CLEAR(result); /* nothing has been done */
            if (result != NULL && given == 0) {      /* who brings nothing gets nothing */
                Py_DECREF(result);
                result = Py_NewRef(Py_None);
            }
        }
    }
    Py_XDECREF(array);
    return result;
}

static PyObject *entrance_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Entrance *self = (Entrance *)object;
    PyObject *result = run_remembered(self, arguments, keywords);
    return result != NULL || PyErr_Occurred() ? result : PyObject_Call(self->function, arguments, keywords);
}

/* Remember a prepared call of the world: remember(op, call, prepared_calls). */
static PyObject *entrance_remember(PyObject *object, PyObject *arguments) {
    Entrance *self = (Entrance *)object;
    PyObject *op, *call, *prepared_calls;
    if (!PyArg_ParseTuple(arguments, "OOO", &op, &call, &prepared_calls)) return NULL;
    if (Py_TYPE(call) == slot_call_type && ((SlotCall *)call)->entrance == NULL) {
        SlotCall *made = (SlotCall *)call;
        Remembered *place = &self->calls[place_of(op, made->brought.dtype, made->brought.ndim, made->brought.shape)];
        forget(place->call);
        place->op = Py_NewRef(op);
        place->call = made;
        PyObject *before = made->prepared_calls;
        made->prepared_calls = Py_NewRef(prepared_calls);
        Py_XDECREF(before);
        made->entrance = (Entrance *)Py_NewRef(object);
    }
    Py_RETURN_NONE;
}

static PyObject **entrance_references(PyObject *object, int place) {
    Entrance *self = (Entrance *)object;
    if (place < REMEMBERED) return &self->calls[place].op;
    PyObject **all[] = {&self->function,   &self->state,  &self->as_array, &self->nothing,
                        &self->array_type, &self->second, &self->usual,    &self->home};
    place -= REMEMBERED;
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int entrance_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, entrance_references, visit, arg);
}

static int entrance_clear(PyObject *object) {
    clear_all(object, entrance_references);
    return 0;
}

static void entrance_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    entrance_clear(object);
    release_object(object);
}

static PyObject *entrance_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *function, *state, *as_array, *nothing, *array_type, *second, *usual, *home;
    int positions;
    if (keywords != NULL ||
        !PyArg_ParseTuple(
            arguments, "OOOOOOOiU", &function, &state, &array_type, &as_array, &nothing, &second, &usual, &positions, &home
        ))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Entrance *self = (Entrance *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->function = Py_NewRef(function);
    self->state = Py_NewRef(state);
    self->array_type = Py_NewRef(array_type);
    self->as_array = Py_NewRef(as_array);
    self->nothing = Py_NewRef(nothing);
    self->second = Py_NewRef(second);
    self->usual = Py_NewRef(usual);
    self->home = Py_NewRef(home);
    self->positions = positions;
    return (PyObject *)self;
}

/* All else is the function's: its name, documentation, signature. */
static PyObject *entrance_getattr(PyObject *object, PyObject *name) {
    PyObject *function = ((Entrance *)object)->function;
    if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(function);
    if (PyUnicode_CompareWithASCIIString(name, "remember") == 0 ||
        PyUnicode_CompareWithASCIIString(name, "__class__") == 0 ||
        PyUnicode_CompareWithASCIIString(name, "__reduce_ex__") == 0 ||
        PyUnicode_CompareWithASCIIString(name, "__reduce__") == 0)
        return PyObject_GenericGetAttr(object, name);
    return PyObject_GetAttr(function, name);
}

static PyObject *entrance_reduce(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyObject_GetAttrString(((Entrance *)object)->function, "__qualname__");
}

static PyObject *entrance_repr(PyObject *object) { return PyObject_Repr(((Entrance *)object)->function); }

static PyMethodDef entrance_methods[] = {
    {"remember", entrance_remember, METH_VARARGS, "Remember a prepared call of the world: (op, call, prepared_calls)."},
    {"__reduce__", entrance_reduce, METH_NOARGS, "Functions are pickled by name."},
    {NULL},
};

static PyType_Slot entrance_slots[] = {
    {Py_tp_new, entrance_new},
    {Py_tp_call, entrance_call},
    {Py_tp_dealloc, entrance_dealloc},
    {Py_tp_traverse, entrance_traverse},
    {Py_tp_clear, entrance_clear},
    {Py_tp_getattro, entrance_getattr},
    {Py_tp_repr, entrance_repr},
    {Py_tp_methods, entrance_methods},
    {Py_tp_doc, "A public function whose prepared calls are found and run without Python's steps; any other call is "
                "the function's."},
    {0, NULL},
};

static PyType_Spec entrance_spec = {
    "syncvar.kernel.native.Entrance", sizeof(Entrance), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entrance_slots,
};

/* -- what the module tells of itself ------------------------------------------------------------------------------- */

/* Say where an array lies, as this module reads it; the loader compares this with what NumPy says. */
static PyObject *describe(PyObject *module, PyObject *value) {
    (void)module;
    const Array *array = (const Array *)value;
    PyObject *shape = PyTuple_New(array->ndim);
    for (int axis = 0; shape != NULL && axis < array->ndim; axis++)
        PyTuple_SetItem(shape, axis, PyLong_FromSsize_t(array->shape[axis]));
    return Py_BuildValue(
        "(KNOi)", (unsigned long long)(uintptr_t)array->data, shape, array->dtype,
        array->flags & (IN_ONE_PIECE | ALIGNED | WRITEABLE)
    );
}

/* Combine two arrays of one dtype and length into a third one by a ufunc's own loop; the loader compares the result. */
static PyObject *combine_once(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *ufunc, *left, *right, *out;
    int number;
    if (!PyArg_ParseTuple(arguments, "OiOOO", &ufunc, &number, &left, &right, &out)) return NULL;
    Step step = {NULL, NULL, NULL};
    if (!find_loop(ufunc, number, &step)) Py_RETURN_FALSE;
    const Array *made = (const Array *)out;
    combine(
        &step, ((const Array *)left)->data, ((const Array *)right)->data, made->strides[0], made->data, made->shape[0],
        made->strides[0]
    );
    Py_DECREF(step.owner);
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"describe", describe, METH_O,
     "Return (address, shape, dtype, flags) of an array, as this module reads its memory."},
    {"combine_once", combine_once, METH_VARARGS,
     "Combine two flat arrays into a third one by the loop of a ufunc; False where it has none."},
    {NULL},
};

/* Add a type to the module; `kept`, which may be NULL, is where it is kept for this module's own use. */
int add_type(PyObject *module, PyType_Spec *spec, const char *name, PyTypeObject **kept) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    const int done = type == NULL ? -1 : PyModule_AddObjectRef(module, name, type);
    if (kept != NULL && done == 0) *kept = (PyTypeObject *)Py_NewRef(type);
    Py_XDECREF(type);
    return done;
}

static int prepare_module(PyObject *module) {
    name_is_quiet = PyUnicode_InternFromString("is_quiet");
    name_locked = PyUnicode_InternFromString("locked");
    name_next_call = PyUnicode_InternFromString("next_call");
    name_is_alert = PyUnicode_InternFromString("is_alert");
    name_acquire = PyUnicode_InternFromString("acquire");
    name_release = PyUnicode_InternFromString("release");
    name_default = PyUnicode_InternFromString("default");
    name_is_bound = PyUnicode_InternFromString("is_bound");
    name_prepared_calls = PyUnicode_InternFromString("prepared_calls");
    name_world = PyUnicode_InternFromString("world");
    name_out = PyUnicode_InternFromString("out");
    name_timeout = PyUnicode_InternFromString("timeout");
    name_async_op = PyUnicode_InternFromString("async_op");
    name_filename = PyUnicode_InternFromString("co_filename");
    name_instruction = PyUnicode_InternFromString("f_lasti");
    name_append = PyUnicode_InternFromString("append");
    name_remove = PyUnicode_InternFromString("remove");
    if (!name_async_op || !name_filename || !name_instruction || !name_append || !name_remove) return -1;
    if (!name_default || !name_is_bound || !name_prepared_calls || !name_world || !name_out || !name_timeout) return -1;
    if (!name_is_quiet || !name_locked || !name_next_call || !name_acquire || !name_release || !name_is_alert)
        return -1;
    if (PyModule_AddIntConstant(module, "FORM", FORM) < 0) return -1;
    if (add_type(module, &channel_state_spec, "ChannelState", &channel_state_type) < 0) return -1;
    if (add_type(module, &entrance_spec, "Entrance", NULL) < 0) return -1;
    if (add_type(module, &slot_call_spec, "SlotCall", &slot_call_type) < 0) return -1;
    if (add_type(module, &begun_spec, "Begun", &begun_type) < 0) return -1;
    if (add_type(module, &program_spec, "Program", &program_type) < 0) return -1;
    if (add_type(module, &run_spec, "Run", &run_type) < 0) return -1;
    return add_writes(module);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, prepare_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "syncvar.kernel.native",
    "Runs prepared calls in shared memory without Python's own steps.",
    0,
    functions,
    module_slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit_native(void) { return PyModuleDef_Init(&definition); }
