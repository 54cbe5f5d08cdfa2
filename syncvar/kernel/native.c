/* The C runner of calls of one phase in shared memory: put, publish, await, compare, combine.
 *
 * It does what syncvar/runtime/shortcut.py says in Python, step by step, for arrays that lie in one piece; whatever is
 * unusual it leaves to that function, before it has changed anything. Arrays are combined by NumPy's own inner loops,
 * so both runners give the same bytes. Only the limited API of CPython is used: one build serves every version
 * from 3.11 on.
 *
 * The interpreter's lock is kept: a call takes about a microsecond. What does not come soon goes on in Python.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

#define YIELD_NS 100000 /* so long a rank gives way to others of its cores, before Python goes on */
#define BLOCK 8192      /* bytes that are combined at a time: all terms of a block stay in the first cache */
#define RANKS_MAX 64
#define LEVELS 6 /* of a tree over RANKS_MAX ranks */
#define SPREAD 0x9E3779B97F4A7C15ull

/* -- what a channel knows of its own progress: the attributes that both runners read and write --------------------- */

typedef struct {
    PyObject_HEAD long long side, last, phase, tail;
    char is_settled;
} ChannelState;

static PyMemberDef channel_state_members[] = {
    {"side", T_LONGLONG, offsetof(ChannelState, side), 0, NULL},
    {"last", T_LONGLONG, offsetof(ChannelState, last), 0, NULL},
    {"phase", T_LONGLONG, offsetof(ChannelState, phase), 0, NULL},
    {"tail", T_LONGLONG, offsetof(ChannelState, tail), 0, NULL},
    {"is_settled", T_BOOL, offsetof(ChannelState, is_settled), 0, NULL},
    {NULL},
};

/* Give back the memory of an object, and what it has held of its type. */
static void release_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot channel_state_slots[] = {
    {Py_tp_members, channel_state_members},
    {Py_tp_dealloc, release_object},
    {Py_tp_doc, "What a rank has published last in a group, and whether everyone has reached it."},
    {0, NULL},
};

static PyType_Spec channel_state_spec = {
    "syncvar.kernel.native.ChannelState",     sizeof(ChannelState), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, channel_state_slots,
};

/* -- NumPy's inner loops ------------------------------------------------------------------------------------------- */

typedef void (*Loop)(char **arrays, const intptr_t *count, const intptr_t *steps, void *data);

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

typedef struct {
    Loop loop;
    void *data;
    PyObject *owner; /* the ufunc, alive as long as its loop is used */
} Step;

/* Find the loop of a ufunc that takes two operands of a type to a result of the same type. */
static int find_loop(PyObject *ufunc, int number, Step *found) {
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

static void combine(
    const Step *step, const char *left, const char *right, intptr_t right_step, char *out, intptr_t count,
    intptr_t width
) {
    char *arrays[3] = {(char *)left, (char *)right, out};
    const intptr_t steps[3] = {width, right_step, width};
    step->loop(arrays, &count, steps, step->data);
}

/* -- arrays -------------------------------------------------------------------------------------------------------- */

/* The beginning of NumPy's PyArrayObject, which its C interface has kept since version 1. */
typedef struct {
    PyObject_HEAD char *data;
    int ndim;
    intptr_t *shape;
    intptr_t *strides;
    PyObject *base;
    PyObject *dtype;
    int flags;
} Array;

#define IN_ONE_PIECE 0x0001
#define ALIGNED 0x0100
#define WRITEABLE 0x0400

#define NDIM_MAX 64

struct Entrance;

/* -- a prepared call ----------------------------------------------------------------------------------------------- */

/* What is copied: from what this rank brings into its slot, or from somewhere into the result. */
typedef struct {
    Py_ssize_t from, to, nbytes, rank; /* whose slot it comes from; -1 for what this rank brings */
} Copy;

/* The shape that an array has to have. */
typedef struct {
    PyObject *dtype;
    int ndim;
    intptr_t shape[NDIM_MAX];
    Py_ssize_t nbytes;
} Form;

typedef struct {
    PyObject_HEAD Py_buffer memory;
    int has_memory;
    uint64_t *words;
    ChannelState *channel;
    PyObject *engine, *communicator, *busy, *queue, *add, *told, *array_type, *make, *make_arguments, *plain, *later,
        *hand_over, *interrupt, *saying, *shortcuts;
    struct Entrance *entrance; /* where it is remembered, if anywhere */
    Form brought, made;
    Copy puts[RANKS_MAX], takes[RANKS_MAX + 1], terms[RANKS_MAX];
    int put_count, take_count, term_count;
    uint64_t digest, detail;
    Py_ssize_t entry, check_at, phase_at, done_at, source_at, target_at, abort_at;
    Py_ssize_t others[RANKS_MAX];
    Py_ssize_t slots[RANKS_MAX];
    Py_ssize_t side_bytes, width;
    int size, rank, shares_cores, looks, tells;
    Step fold, divide, apply;
    char divisor[16];
} SlotCall;

static PyObject *name_is_quiet, *name_locked, *name_next_call, *name_acquire, *name_release;

static int is_fitting(const SlotCall *self, const Form *form, PyObject *value, int flags) {
    if ((PyObject *)Py_TYPE(value) != self->array_type) return 0;
    const Array *array = (const Array *)value;
    if (array->dtype != form->dtype || array->ndim != form->ndim || (array->flags & flags) != flags) return 0;
    for (int axis = 0; axis < form->ndim; axis++)
        if (array->shape[axis] != form->shape[axis]) return 0;
    return 1;
}

/* Return whether a result may be written while parts of what is brought are still to be read. */
static int lie_apart(const SlotCall *self, PyObject *x, PyObject *out) {
    const char *brought = ((Array *)x)->data, *made = ((Array *)out)->data;
    int is_all_put_before = self->take_count == 0;
    for (int term = 0; term < self->term_count; term++)
        is_all_put_before = is_all_put_before && self->terms[term].rank >= 0;
    return is_all_put_before || (x == out && self->term_count == 0) || brought + self->brought.nbytes <= made ||
           made + self->made.nbytes <= brought;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline uint64_t seen(const SlotCall *self, Py_ssize_t place) {
    return __atomic_load_n(self->words + place, __ATOMIC_ACQUIRE);
}

static inline void store(SlotCall *self, Py_ssize_t place, uint64_t value) {
    __atomic_store_n(self->words + place, value, __ATOMIC_RELEASE);
}

/* Wait a short while until all others have published this word. */
static int have_come(const SlotCall *self, uint64_t target) {
    int64_t until = 0;
    for (int other = 0; other < self->size - 1; other++) {
        const Py_ssize_t place = self->others[other];
        int looks = 0;
        while (seen(self, place) < target) {
            if (++looks <= self->looks) {
                RELAX();
                continue;
            }
            if (!self->shares_cores || seen(self, self->abort_at)) return 0;
            const int64_t now = now_ns();
            if (until == 0) until = now + YIELD_NS;
            if (now >= until) return 0;
            looks = 0;
            sched_yield();
        }
    }
    return 1;
}

/* Combine terms [low, high) of a block by the tree over ranks: T(low, high) = T(low, middle) + T(middle, high). */
static void
combine_tree(const SlotCall *self, const char **terms, int low, int high, char *out, char *scratch, intptr_t count) {
    int half = 1;
    while (2 * half < high - low) half *= 2;
    const int middle = low + half;
    const char *left = terms[low], *right = terms[middle];
    if (middle - low > 1) {
        combine_tree(self, terms, low, middle, out, scratch, count);
        left = out;
    }
    if (high - middle > 1) {
        combine_tree(self, terms, middle, high, scratch, scratch + BLOCK, count);
        right = scratch;
    }
    combine(&self->fold, left, right, self->width, out, count, self->width);
}

static const char *place_in(const SlotCall *self, const Copy *copy, int side, const char *brought) {
    return copy->rank < 0 ? brought + copy->from
                          : (const char *)self->words + self->slots[copy->rank] + side * self->side_bytes + copy->from;
}

/* Combine the terms, block by block, into the result. */
static void combine_terms(const SlotCall *self, int side, const char *brought, char *out) {
    _Alignas(64) char scratch[(LEVELS + 1) * BLOCK];
    const char *terms[RANKS_MAX];
    for (Py_ssize_t start = 0; start < self->made.nbytes; start += BLOCK) {
        intptr_t count = (self->made.nbytes - start) / self->width;
        if (count > BLOCK / self->width) count = BLOCK / self->width;
        for (int term = 0; term < self->term_count; term++)
            terms[term] = place_in(self, &self->terms[term], side, brought) + start;
        char *made = self->apply.loop == NULL ? out + start : scratch + LEVELS * BLOCK;
        combine_tree(self, terms, 0, self->term_count, made, scratch, count);
        if (self->divide.loop != NULL) combine(&self->divide, made, self->divisor, 0, made, count, self->width);
        if (self->apply.loop != NULL)
            combine(&self->apply, out + start, made, self->width, out + start, count, self->width);
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

/* Let Python go on with a call that has been published: it waits longer, and knows what else there is.
 *
 * `later` returns the result, or a generator where the engine has to go on. An error in it has left a call that others
 * take part in, wherever a signal may have struck. */
static PyObject *go_on(
    SlotCall *self, PyObject *number, PyObject *begin, PyObject *x, PyObject *out, PyObject *made, PyObject *said,
    PyObject *timeout
) {
    PyObject *taken =
        PyObject_CallMethodObjArgs(self->busy, name_acquire, Py_False, NULL); /* free: nobody else has run since */
    PyObject *told =
        taken == NULL ? NULL : PyObject_CallFunctionObjArgs(self->later, number, begin, x, out, made, said, NULL);
    PyObject *result = NULL;
    if (told == NULL) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        PyObject *done = PyObject_CallFunctionObjArgs(self->interrupt, number, begin, error, said, NULL);
        if (done == NULL) PyErr_Clear();
        Py_XDECREF(done);
        PyErr_Restore(type, error, trace);
    } else if (PyTuple_GetItem(told, 0) == Py_True) {
        result = Py_NewRef(PyTuple_GetItem(told, 1));
    } else {
        result =
            PyObject_CallFunctionObjArgs(self->hand_over, number, begin, PyTuple_GetItem(told, 1), said, timeout, NULL);
    }
    Py_XDECREF(told);
    if (taken != NULL) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        PyObject *released = PyObject_CallMethodObjArgs(self->busy, name_release, NULL);
        if (released == NULL) PyErr_Clear();
        Py_XDECREF(released);
        Py_DECREF(taken);
        PyErr_Restore(type, error, trace);
    }
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

/* Return whether a call may begin now: no refusal is known, nothing is queued, nobody else is in the group's calls. */
static int may_begin(const SlotCall *self) {
    if (!self->channel->is_settled || !is_true(self->engine, name_is_quiet) || PyObject_Size(self->queue) != 0)
        return 0;
    PyObject *locked = PyObject_CallMethodObjArgs(self->busy, name_locked, NULL);
    Py_XDECREF(locked);
    if (locked == NULL) PyErr_Clear(); /* Python will say what is wrong */
    return locked == Py_False;
}

static PyObject *run_slots(SlotCall *self, PyObject *x, PyObject *out, PyObject *said, PyObject *timeout) {
    ChannelState *channel = self->channel;
    PyObject *told = NULL, *made = NULL, *number = NULL, *begin = NULL, *following = NULL, *result = NULL;
    uint64_t digest = self->digest;

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
    /* What comes before may have run other threads, or the collector of garbage; from here on nothing does. */
    if (!may_begin(self)) goto unusual;
    number = PyObject_GetAttr(self->communicator, name_next_call);
    if (number == NULL) goto done;
    const long long call = PyLong_AsLongLong(number);
    following = call < 0 ? NULL : PyLong_FromLongLong(call + 1);
    begin = PyLong_FromLongLong(now_ns());
    if (following == NULL || begin == NULL || PyObject_SetAttr(self->communicator, name_next_call, following) < 0)
        goto done;

    /* From here to the end of the wait nothing can fail: others take part in the call now. */
    const int side = (int)(channel->side ^= 1);
    char *own = (char *)self->words + self->slots[self->rank] + side * self->side_bytes;
    for (int put = 0; put < self->put_count; put++)
        memcpy(own + self->puts[put].to, ((Array *)x)->data + self->puts[put].from, self->puts[put].nbytes);
    const uint64_t plain = digest + (uint64_t)call * SPREAD, check = plain + self->detail;
    store(self, self->entry + self->check_at + side, check);
    if (self->tells) { /* what differs may be the detail alone: then the others need to know the call itself */
        store(self, self->entry + self->source_at + side, plain);
        store(self, self->entry + self->target_at + side, 0);
    }
    const uint64_t target = ((uint64_t)call << 1) + 2;
    channel->last = (long long)target;
    if (channel->phase || self->words[self->entry + self->done_at]) {
        store(self, self->entry + self->done_at, (uint64_t)channel->phase);
        channel->phase = 0;
        store(self, self->entry + self->phase_at, 0);
    }
    store(self, self->entry, target | (uint64_t)side);
    int agree = have_come(self, target);
    for (int other = 0; agree && other < self->size - 1; other++)
        agree = seen(self, self->others[other] + self->check_at + side) ==
                check; /* who has not been given up a call has it on this side */
    if (!agree) {
        result = go_on(self, number, begin, x, out, made, said, timeout);
    } else {
        finish(self, side, ((Array *)x)->data, ((Array *)made)->data);
        if (record(self, told, number, begin) == 0) result = Py_NewRef(made);
    }
done:
    Py_XDECREF(told);
    Py_XDECREF(made);
    Py_XDECREF(number);
    Py_XDECREF(begin);
    Py_XDECREF(following);
    return result;

unusual:
    result = PyObject_CallFunctionObjArgs(self->plain, x, out, said, timeout, NULL);
    goto done;
}

static PyObject *slot_call_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t given = PyTuple_Size(arguments);
    if (given < 2 || given > 4 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "a prepared call takes (x, out, said, timeout)");
        return NULL;
    }
    PyObject *said = given > 2 ? PyTuple_GetItem(arguments, 2) : Py_None,
             *timeout = given > 3 ? PyTuple_GetItem(arguments, 3) : Py_None;
    return run_slots((SlotCall *)object, PyTuple_GetItem(arguments, 0), PyTuple_GetItem(arguments, 1), said, timeout);
}

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
        &self->shortcuts,
        &self->fold.owner,
        &self->divide.owner,
        &self->apply.owner,
    };
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

/* Visit, or let go of, all that an object holds, as the collector of garbage asks for. */
typedef PyObject **(*References)(PyObject *object, int place);

static int visit_all(PyObject *object, References references_of, visitproc visit, void *arg) {
    PyObject **found;
    Py_VISIT(Py_TYPE(object));
    for (int place = 0; (found = references_of(object, place)) != NULL; place++) Py_VISIT(*found);
    return 0;
}

static void clear_all(PyObject *object, References references_of) {
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
    SlotCall *self = (SlotCall *)object;
    PyObject_GC_UnTrack(object);
    slot_call_clear(object);
    if (self->has_memory) PyBuffer_Release(&self->memory);
    release_object(object);
}

/* Read a tuple of numbers; returns how many, or -1. */
static Py_ssize_t read_numbers(PyObject *given, Py_ssize_t *into, Py_ssize_t most) {
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
static int read_form(PyObject *given, Form *form) {
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

static int is_within(Py_ssize_t start, Py_ssize_t nbytes, Py_ssize_t whole) {
    return start >= 0 && nbytes >= 0 && nbytes <= whole && start <= whole - nbytes;
}

/* Look whether all that a call can touch lies in the arena and in its arrays: nothing is compared later. */
static int check_places(const SlotCall *self) {
    const Py_ssize_t entry_bytes = 8 * 16, arena = self->memory.len, brought = self->brought.nbytes,
                     made = self->made.nbytes;
    const Py_ssize_t fields[] = {self->check_at, self->phase_at, self->done_at, self->source_at, self->target_at};
    int good = is_within(8 * self->entry, entry_bytes, arena) && is_within(8 * self->abort_at, 8, arena);
    for (int field = 0; field < 5; field++) good = good && is_within(8 * fields[field], 16, entry_bytes);
    for (int other = 0; other < self->size - 1; other++)
        good = good && is_within(8 * self->others[other], entry_bytes, arena);
    for (int rank = 0; rank < self->size; rank++)
        good = good && is_within(self->slots[rank], 2 * self->side_bytes, arena);
    for (int put = 0; put < self->put_count; put++)
        good = good && is_within(self->puts[put].from, self->puts[put].nbytes, brought) &&
               is_within(self->puts[put].to, self->puts[put].nbytes, self->side_bytes);
    for (int take = 0; take < self->take_count + self->term_count; take++) {
        const Copy *copy = take < self->take_count ? &self->takes[take] : &self->terms[take - self->take_count];
        good = good && copy->rank < self->size &&
               is_within(copy->from, copy->nbytes, copy->rank < 0 ? brought : self->side_bytes);
        good = good && is_within(copy->to, copy->nbytes, made) && (take < self->take_count || copy->nbytes == made);
    }
    if (!good) PyErr_SetString(PyExc_ValueError, "a prepared call would use memory outside its arrays or the arena");
    return good;
}

static PyObject *slot_call_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {
        "memory",  "channel", "engine", "communicator", "busy",      "queue",      "add",    "told",         "digest",
        "detail",  "entry",   "fields", "others",       "slots",     "side_bytes", "rank",   "shares_cores", "looks",
        "tells",   "brought", "made",   "puts",         "takes",     "terms",      "fold",   "divide",       "apply",
        "divisor", "make",    "plain",  "later",        "hand_over", "interrupt",  "saying", NULL,
    };
    PyObject *memory, *channel, *engine, *communicator, *busy, *queue, *add, *told, *fields, *others, *slots, *brought,
        *made, *puts, *takes, *terms;
    PyObject *fold, *divide, *apply, *make, *plain, *later, *hand_over, *interrupt, *saying;
    const char *divisor;
    Py_ssize_t divisor_bytes, entry, side_bytes, places[6];
    unsigned long long digest, detail;
    int rank, shares_cores, looks, tells;
    if (!PyArg_ParseTupleAndKeywords(
            arguments, keywords, "$OOOOOOOOKKnOOOnipipOOOOOOOOy#OOOOOO:SlotCall", names, &memory, &channel, &engine,
            &communicator, &busy, &queue, &add, &told, &digest, &detail, &entry, &fields, &others, &slots, &side_bytes,
            &rank, &shares_cores, &looks, &tells, &brought, &made, &puts, &takes, &terms, &fold, &divide, &apply,
            &divisor, &divisor_bytes, &make, &plain, &later, &hand_over, &interrupt, &saying
        ))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    SlotCall *self = (SlotCall *)allocate(type, 0);
    if (self == NULL) return NULL;
    PyObject *numpy = NULL, *number = NULL, *itemsize = NULL;
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
    self->digest = digest;
    self->detail = detail;
    self->entry = entry;
    self->side_bytes = side_bytes;
    self->rank = rank;
    self->shares_cores = shares_cores;
    self->looks = looks;
    self->tells = tells;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) goto failed;
    self->has_memory = 1;
    self->words = self->memory.buf;
    if (read_numbers(fields, places, 6) != 6) goto wrong;
    self->check_at = places[0];
    self->phase_at = places[1];
    self->done_at = places[2];
    self->source_at = places[3];
    self->target_at = places[4];
    self->abort_at = places[5];
    self->size = (int)read_numbers(slots, self->slots, RANKS_MAX);
    if (self->size < 2 || read_numbers(others, self->others, RANKS_MAX) != self->size - 1 || rank < 0 ||
        rank >= self->size)
        goto wrong;
    if (!read_form(brought, &self->brought) || !read_form(made, &self->made)) goto failed;
    self->put_count = read_copies(puts, self->puts, RANKS_MAX);
    self->take_count = read_copies(takes, self->takes, RANKS_MAX + 1);
    self->term_count = read_copies(terms, self->terms, RANKS_MAX);
    if (self->put_count < 0 || self->take_count < 0 || self->term_count < 0) goto failed;
    itemsize = PyObject_GetAttrString(self->made.dtype, "itemsize");
    number = PyObject_GetAttrString(self->made.dtype, "num");
    if (itemsize == NULL || number == NULL) goto failed;
    self->width = PyLong_AsSsize_t(itemsize);
    const int kind = (int)PyLong_AsLong(number);
    if (fold != Py_None) {
        if (self->width < 1 || BLOCK % self->width != 0 || self->term_count != self->size ||
            !find_loop(fold, kind, &self->fold))
            goto wrong;
        if (divide != Py_None && (divisor_bytes != self->width || divisor_bytes > (Py_ssize_t)sizeof self->divisor ||
                                  !find_loop(divide, kind, &self->divide)))
            goto wrong;
        if (apply != Py_None && !find_loop(apply, kind, &self->apply)) goto wrong;
        if (divide != Py_None) memcpy(self->divisor, divisor, divisor_bytes);
    } else if (self->term_count || divide != Py_None || apply != Py_None) {
        goto wrong;
    }
    if (!check_places(self)) goto failed;
    numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) goto failed;
    self->array_type = PyObject_GetAttrString(numpy, "ndarray");
    if (self->array_type == NULL) goto failed;
    self->make_arguments = PyTuple_Pack(2, PyTuple_GetItem(made, 1), PyTuple_GetItem(made, 0));
    if (self->make_arguments == NULL) goto failed;
    Py_DECREF(numpy);
    Py_DECREF(itemsize);
    Py_DECREF(number);
    return (PyObject *)self;
wrong:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "this call cannot be prepared here");
failed:
    Py_XDECREF(numpy);
    Py_XDECREF(itemsize);
    Py_XDECREF(number);
    Py_DECREF(self);
    return NULL;
}

static PyType_Slot slot_call_slots[] = {
    {Py_tp_new, slot_call_new},
    {Py_tp_call, slot_call_call},
    {Py_tp_dealloc, slot_call_dealloc},
    {Py_tp_traverse, slot_call_traverse},
    {Py_tp_clear, slot_call_clear},
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
    PyObject_HEAD PyObject *function, *state, *array_type, *as_array, *nothing, *second, *usual;
    int positions; /* how many arguments may be given by position */
    Remembered calls[REMEMBERED];
} Entrance;

static PyTypeObject *slot_call_type;
static PyObject *name_default, *name_is_bound, *name_shortcuts, *name_world, *name_out, *name_timeout;

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
    PyObject *shortcuts = world != call->communicator ? NULL : PyObject_GetAttr(world, name_shortcuts);
    const int same = shortcuts != NULL && shortcuts == call->shortcuts && !is_true(self->state, name_is_bound);
    Py_XDECREF(context);
    Py_XDECREF(world);
    Py_XDECREF(shortcuts);
    if (PyErr_Occurred()) PyErr_Clear();
    return same;
}

/* Run a call that has been remembered; NULL without an error where the function itself has to be called. */
static PyObject *run_remembered(Entrance *self, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t given = PyTuple_Size(arguments);
    PyObject *x = given > 0 ? PyTuple_GetItem(arguments, 0) : self->nothing,
             *op = given > 1 ? PyTuple_GetItem(arguments, 1) : self->usual;
    PyObject *out = Py_None, *timeout = Py_None;
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
            result = run_slots(call, array, out, Py_None, timeout);
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

/* Remember a prepared call of the world: remember(op, call, shortcuts). */
static PyObject *entrance_remember(PyObject *object, PyObject *arguments) {
    Entrance *self = (Entrance *)object;
    PyObject *op, *call, *shortcuts;
    if (!PyArg_ParseTuple(arguments, "OOO", &op, &call, &shortcuts)) return NULL;
    if (Py_TYPE(call) == slot_call_type && ((SlotCall *)call)->entrance == NULL) {
        SlotCall *made = (SlotCall *)call;
        Remembered *place = &self->calls[place_of(op, made->brought.dtype, made->brought.ndim, made->brought.shape)];
        forget(place->call);
        place->op = Py_NewRef(op);
        place->call = made;
        PyObject *before = made->shortcuts;
        made->shortcuts = Py_NewRef(shortcuts);
        Py_XDECREF(before);
        made->entrance = (Entrance *)Py_NewRef(object);
    }
    Py_RETURN_NONE;
}

static PyObject **entrance_references(PyObject *object, int place) {
    Entrance *self = (Entrance *)object;
    if (place < REMEMBERED) return &self->calls[place].op;
    PyObject **all[] = {&self->function,   &self->state,  &self->as_array, &self->nothing,
                        &self->array_type, &self->second, &self->usual};
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
    PyObject *function, *state, *as_array, *nothing, *array_type, *second, *usual;
    int positions;
    if (keywords != NULL ||
        !PyArg_ParseTuple(
            arguments, "OOOOOOOi", &function, &state, &array_type, &as_array, &nothing, &second, &usual, &positions
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
    {"remember", entrance_remember, METH_VARARGS, "Remember a prepared call of the world: (op, call, shortcuts)."},
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

/* -- prepared writes of variables ---------------------------------------------------------------------------------- */

/* What is counted of a variable; see syncvar/variables/prepared.py for this and what follows. */
typedef struct {
    PyObject_HEAD long long writes, collectives, added, steps;
} Tally;

static PyMemberDef tally_members[] = {
    {"writes", T_LONGLONG, offsetof(Tally, writes), 0, NULL},
    {"collectives", T_LONGLONG, offsetof(Tally, collectives), 0, NULL},
    {"added", T_LONGLONG, offsetof(Tally, added), 0, NULL},
    {"steps", T_LONGLONG, offsetof(Tally, steps), 0, NULL},
    {NULL},
};

static PyType_Slot tally_slots[] = {
    {Py_tp_members, tally_members}, {Py_tp_dealloc, release_object}, {Py_tp_doc, "What is counted of a variable."}, {0, NULL}
};

static PyType_Spec tally_spec = {
    "syncvar.kernel.native.Tally", sizeof(Tally), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, tally_slots,
};

/* Whether writes have to be counted, and up to which number they pass unseen. */
typedef struct {
    PyObject_HEAD long long until;
    char is_free;
} Watch;

static PyMemberDef watch_members[] = {
    {"until", T_LONGLONG, offsetof(Watch, until), 0, NULL},
    {"is_free", T_BOOL, offsetof(Watch, is_free), 0, NULL},
    {NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_members, watch_members}, {Py_tp_dealloc, release_object}, {Py_tp_doc, "When writes are looked at."}, {0, NULL}
};

static PyType_Spec watch_spec = {
    "syncvar.kernel.native.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, watch_slots,
};

/* Whether a call of all replicas writes a copy, and how often it has gone to other memory. */
typedef struct {
    PyObject_HEAD long long moves;
    char is_being_written;
} Copied;

static PyMemberDef copied_members[] = {
    {"moves", T_LONGLONG, offsetof(Copied, moves), 0, NULL},
    {"is_being_written", T_BOOL, offsetof(Copied, is_being_written), 0, NULL},
    {NULL},
};

static PyType_Slot copied_slots[] = {
    {Py_tp_members, copied_members}, {Py_tp_dealloc, release_object}, {Py_tp_doc, "What is going on with a copy."}, {0, NULL}
};

static PyType_Spec copied_spec = {
    "syncvar.kernel.native.Copied", sizeof(Copied), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, copied_slots,
};

typedef struct {
    PyObject_HEAD PyObject *call, *plain, *places, *owner, *communicator, *channel, *replica, *array_type;
    Copied *storage;
    Tally *tally;
    Watch *watch; /* NULL where nothing is compared */
    Form form;
    int is_default, is_increment;
    /* Of the storage, as long as it has not moved: it holds these. */
    long long moves;
    PyObject *array, *ground, *beneath;
    long long references;
} Write;

enum { UNDONE, DONE, DECIDE };
#define WRITES_PER_DECISION 64

static PyObject *name_stack, *name_channel, *name_array, *name_ground, *name_beneath, *name_references;

static int has_form(const Write *self, PyObject *value) {
    if ((PyObject *)Py_TYPE(value) != self->array_type) return 0;
    const Array *array = (const Array *)value;
    return array->dtype == self->form.dtype && array->ndim == self->form.ndim &&
           memcmp(array->shape, self->form.shape, self->form.ndim * sizeof(intptr_t)) == 0;
}

/* Return whether each replica writes its own values where the thread is; says whether it is outside every scope. */
static int is_in_place(const Write *self, int *is_outside) {
    PyObject *stack = PyObject_GetAttr(self->places, name_stack);
    if (stack == NULL) return 0;
    const Py_ssize_t depth = PyList_Size(stack);
    PyObject *place = depth > 0 ? PyList_GetItem(stack, depth - 1) : NULL;
    *is_outside = depth == 0;
    const int good = place == NULL ? depth == 0 && self->is_default
                                   : PyTuple_GetItem(place, 0) == self->owner && PyTuple_GetItem(place, 1) == self->replica;
    Py_DECREF(stack);
    return good;
}

static int has_channel(const Write *self) {
    PyObject *channel = PyObject_GetAttr(self->communicator, name_channel);
    Py_XDECREF(channel); /* what is compared is an address */
    return channel == self->channel;
}

/* Learn where the copy lies; only as long as the storage has not moved what it refers to is alive. */
static int find_copy(Write *self) {
    PyObject *storage = (PyObject *)self->storage, *array = PyObject_GetAttr(storage, name_array),
             *ground = PyObject_GetAttr(storage, name_ground), *beneath = PyObject_GetAttr(storage, name_beneath),
             *references = PyObject_GetAttr(storage, name_references);
    self->references = references == NULL ? -1 : PyLong_AsLongLong(references);
    self->array = array;
    self->ground = ground;
    self->beneath = beneath;
    self->moves = self->storage->moves;
    const int good = array != NULL && ground != NULL && beneath != NULL && self->references >= 0;
    if (!good) self->moves = -1;
    Py_XDECREF(array);
    Py_XDECREF(ground);
    Py_XDECREF(beneath);
    Py_XDECREF(references);
    return good;
}

/* Return whether a view of the copy is alive, as Storage.is_exposed, which counts a reference of its own to each. */
static int is_exposed(const Write *self) {
    const long long count = (long long)(uint32_t)Py_REFCNT(self->ground) + (uint32_t)Py_REFCNT(self->beneath);
    return count + 2 > self->references;
}

/* Make a prepared call that applies its result to the copy. */
static PyObject *run_prepared(PyObject *call, PyObject *x, PyObject *array, PyObject *timeout) {
    if (Py_TYPE(call) == slot_call_type) return run_slots((SlotCall *)call, x, array, Py_None, timeout);
    return PyObject_CallFunctionObjArgs(call, x, array, Py_None, timeout, NULL);
}

static PyObject *write_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Write *self = (Write *)object;
    int is_outside = 0, done = UNDONE;
    PyObject *x = PyTuple_Size(arguments) == 1 ? PyTuple_GetItem(arguments, 0) : NULL, *timeout = NULL;
    if (x == NULL || keywords != NULL || !has_form(self, x)) goto plain;
    if (!is_in_place(self, &is_outside) || !has_channel(self)) goto plain;
    const int is_counted = self->watch != NULL && !self->watch->is_free;
    if (is_counted && self->tally->steps >= self->watch->until) goto plain;
    if (self->moves != self->storage->moves && !find_copy(self)) goto plain;
    timeout = PyObject_GetAttr(self->owner, name_timeout);
    if (timeout == NULL || is_exposed(self)) goto plain;
    PyObject *array = Py_NewRef(self->array);
    self->tally->steps += is_counted;
    self->storage->is_being_written = 1;
    PyObject *result = run_prepared(self->call, x, array, timeout);
    self->storage->is_being_written = 0;
    Py_DECREF(array);
    Py_DECREF(timeout);
    if (result == NULL) return NULL;
    if (result == Py_None) {
        self->tally->steps -= is_counted;
    } else {
        self->tally->writes++;
        self->tally->collectives++;
        done = DONE;
        if (self->is_increment && ++self->tally->added % WRITES_PER_DECISION == 0 && is_outside) done = DECIDE;
    }
    Py_DECREF(result);
    return PyLong_FromLong(done);
plain:
    Py_XDECREF(timeout);
    PyErr_Clear(); /* Python will say what is wrong */
    return PyObject_Call(self->plain, arguments, keywords);
}

static PyObject **write_references(PyObject *object, int place) {
    Write *self = (Write *)object;
    PyObject **all[] = {
        &self->call,
        &self->plain,
        &self->places,
        &self->owner,
        &self->communicator,
        &self->channel,
        &self->replica,
        &self->array_type,
        (PyObject **)&self->storage,
        (PyObject **)&self->tally,
        (PyObject **)&self->watch,
        &self->form.dtype,
    };
    return place < (int)(sizeof all / sizeof all[0]) ? all[place] : NULL;
}

static int write_traverse(PyObject *object, visitproc visit, void *arg) {
    return visit_all(object, write_references, visit, arg);
}

static int write_clear(PyObject *object) {
    clear_all(object, write_references);
    return 0;
}

static void write_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    write_clear(object);
    release_object(object);
}

static PyTypeObject *tally_type, *watch_type, *copied_type;

static PyObject *write_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *call, *plain, *places, *owner, *communicator, *channel, *replica, *array_type, *storage, *tally, *watch, *form;
    int is_default, is_increment;
    if (keywords != NULL || !PyArg_ParseTuple(
                                arguments, "OOOOOOOOO!O!OOpp", &call, &plain, &places, &owner, &communicator, &channel,
                                &replica, &array_type, copied_type, &storage, tally_type, &tally, &watch, &form,
                                &is_default, &is_increment
                            ))
        return NULL;
    if (watch != Py_None && !PyObject_TypeCheck(watch, watch_type)) {
        PyErr_SetString(PyExc_TypeError, "a write is looked at by a Watch, or None");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Write *self = (Write *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->call = Py_NewRef(call);
    self->plain = Py_NewRef(plain);
    self->places = Py_NewRef(places);
    self->owner = Py_NewRef(owner);
    self->communicator = Py_NewRef(communicator);
    self->channel = Py_NewRef(channel);
    self->replica = Py_NewRef(replica);
    self->array_type = Py_NewRef(array_type);
    self->storage = (Copied *)Py_NewRef(storage);
    self->tally = (Tally *)Py_NewRef(tally);
    self->watch = watch == Py_None ? NULL : (Watch *)Py_NewRef(watch);
    self->is_default = is_default;
    self->is_increment = is_increment;
    self->moves = -1;
    if (!read_form(form, &self->form)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyType_Slot write_slots[] = {
    {Py_tp_new, write_new},
    {Py_tp_call, write_call},
    {Py_tp_dealloc, write_dealloc},
    {Py_tp_traverse, write_traverse},
    {Py_tp_clear, write_clear},
    {Py_tp_doc, "A prepared write of a variable: write(x) says what has been done."},
    {0, NULL},
};

static PyType_Spec write_spec = {
    "syncvar.kernel.native.Write", sizeof(Write), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, write_slots,
};

static PyTypeObject *added_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL || PyModule_AddObjectRef(module, name, type) < 0) return NULL;
    return (PyTypeObject *)type; /* kept for ever */
}

/* Add what prepared writes are made of. */
static int add_writes(PyObject *module) {
    name_stack = PyUnicode_InternFromString("stack");
    name_channel = PyUnicode_InternFromString("channel");
    name_array = PyUnicode_InternFromString("array");
    name_ground = PyUnicode_InternFromString("_ground");
    name_beneath = PyUnicode_InternFromString("_beneath");
    name_references = PyUnicode_InternFromString("_references");
    if (!name_stack || !name_channel || !name_array || !name_ground || !name_beneath || !name_references) return -1;
    tally_type = added_type(module, &tally_spec, "Tally");
    watch_type = added_type(module, &watch_spec, "Watch");
    copied_type = added_type(module, &copied_spec, "Copied");
    return tally_type && watch_type && copied_type && added_type(module, &write_spec, "Write") ? 0 : -1;
}

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

static int add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    const int done = type == NULL ? -1 : PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return done;
}

static int prepare_module(PyObject *module) {
    name_is_quiet = PyUnicode_InternFromString("is_quiet");
    name_locked = PyUnicode_InternFromString("locked");
    name_next_call = PyUnicode_InternFromString("next_call");
    name_acquire = PyUnicode_InternFromString("acquire");
    name_release = PyUnicode_InternFromString("release");
    name_default = PyUnicode_InternFromString("default");
    name_is_bound = PyUnicode_InternFromString("is_bound");
    name_shortcuts = PyUnicode_InternFromString("shortcuts");
    name_world = PyUnicode_InternFromString("world");
    name_out = PyUnicode_InternFromString("out");
    name_timeout = PyUnicode_InternFromString("timeout");
    if (!name_default || !name_is_bound || !name_shortcuts || !name_world || !name_out || !name_timeout) return -1;
    if (!name_is_quiet || !name_locked || !name_next_call || !name_acquire || !name_release) return -1;
    if (add_type(module, &channel_state_spec, "ChannelState") < 0 || add_type(module, &entrance_spec, "Entrance") < 0)
        return -1;
    if (add_type(module, &slot_call_spec, "SlotCall") < 0) return -1;
    slot_call_type = (PyTypeObject *)PyObject_GetAttrString(module, "SlotCall");
    if (add_writes(module) < 0) return -1;
    return slot_call_type == NULL ? -1 : 0;
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
