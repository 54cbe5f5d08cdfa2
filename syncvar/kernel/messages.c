/* Messages that need no waiting, through a box in the arena: what `engine/at_once.py` does, for arrays of a dtype and shape
 * that it has met before. Whatever is unusual is left to it, before anything has been changed.
 *
 * `arena/boxes.py` says what lies where in a box. The bytes of an entry are stored before FILLED (release), and read after
 * it (acquire); they have been read before USED is stored (release). A long entry is published piece by piece, so that the
 * receiver copies the first ones while the last ones are still to come. So much is done with the interpreter's lock.
 *
 * A long message waits for its receiver, and both let go of the lock. While the sender looks for the answer, ATTENDED has the
 * message's number, and a receiver that finds it there asks for parts: the sender puts them while the receiver takes them.
 * Where either has to wait for long, or finds something else, Python's engine goes on from the byte that has been reached.
 */
#include "common.h"

#define LINE 64
#define PIECE 16384     /* bytes that are published at a time */
#define PART_BYTES 32768 /* of a long message */
#define YIELD_NS 100000 /* so long a rank gives way to others of its cores, before Python goes on */
#define LONG_BYTES 8388608 /* no longer message goes by parts: the caches are too small for it, and its receiver may as well read it alone */
#define PLACES 8        /* of long messages that are open */
#define SORTS 16        /* dtypes and shapes that are known of a pair and tag; the oldest goes */
#define NDIM_MAX 13

/* Words of a box, and of an entry. */
enum { FILLED = 0, NEWS = 1, NUMBER = 4, ATTENDED = 5, USED = 8, FULL = 9, ANSWERS = 16, GIVEN_UP = 24 };
enum { LENGTH = 0, WHAT = 1, STREAM = 2, CALL = 3, NBYTES = 4, SHAPE = 5, START = 5 };
enum { GAP = 0, WHOLE = 1, TOLD = 2, PART = 3 };

/* What messages of one dtype and shape have in common. */
typedef struct {
    PyObject *dtype, *shape_object, *told;
    uint64_t what;
    int ndim;
    intptr_t shape[NDIM_MAX];
    uint64_t nbytes;
} Sort;

struct Door;

/* How far the messages of a pair and tag are; `kernel` says what its members mean. */
typedef struct {
    PyObject_HEAD PyObject *identity, *references;
    long long next_call, number;
} Count;

/* One end of a pair and tag. */
enum {
    COUNT, ENGINE, CONTEXT, ADD, GO_ON,
    BUSY_LOCKED, BUSY_ACQUIRE, BUSY_RELEASE, /* of the lock of the pair and tag */
    BOX_LOCKED, BOX_ACQUIRE, BOX_RELEASE,    /* of that of this end of the box */
    KEPT, SHARED, ARRAY_TYPE, MAKE, OBJECTS
};

typedef struct {
    PyObject_HEAD Py_buffer memory;
    int has_memory;
    uint64_t *words; /* of the box */
    char *ring;
    uint64_t ring_bytes, entry_bytes_max, eager_bytes, identity, used; /* as far as it has been looked at */
    uint64_t *abort;
    int looks, shares_cores;
    int64_t patience_ns; /* so long it waits in a long message without the lock, before the engine goes on */
    PyObject *objects[OBJECTS];
    Sort sorts[SORTS];
    int next_sort;
    struct Door *door; /* where it is remembered, if anywhere */
} End;

#define REMEMBERED 64 /* ends, by peer and tag; of two in one place the newer one stays */

/* Stands for `send` or `recv`. */
typedef struct Door {
    PyObject_HEAD PyObject *function, *state;
    int is_sending;
    struct {
        End *end;
        long long peer, tag;
    } ends[REMEMBERED];
} Door;

static PyObject *name_is_quiet, *name_uneven, *name_is_bound, *name_tag, *name_out;
static PyTypeObject *count_type, *end_type;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static uint64_t seen(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

static uint64_t in_lines(uint64_t nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

/* Where the bytes of an entry begin. */
static uint64_t data_at(int ndim, uint64_t nbytes) {
    const uint64_t head = 8 * (SHAPE + (uint64_t)ndim);
    return nbytes < 1024 ? head : in_lines(head);
}

/* Copy bytes between the caches of cores. The C library takes string instructions for so much, which are slower here by a
 * tenth, and by half where the cores are far from each other (measured); the barrier keeps the compiler from calling it. */
#define COPIES_BY(bytes)                                                                                   \
    (char *target, const char *source, uint64_t nbytes) {                                                  \
        typedef uint64_t Vector __attribute__((vector_size(bytes), aligned(1), may_alias));                \
        enum { VECTORS = 2 * LINE / (bytes) };                                                             \
        uint64_t done = 0;                                                                                 \
        for (; done + 2 * LINE <= nbytes; done += 2 * LINE) {                                              \
            const Vector *from = (const Vector *)(source + done);                                          \
            Vector *to = (Vector *)(target + done), held[VECTORS];                                         \
            _Pragma("GCC unroll 8") for (int each = 0; each < VECTORS; each++) held[each] = from[each];    \
            _Pragma("GCC unroll 8") for (int each = 0; each < VECTORS; each++) to[each] = held[each];      \
            __asm__ volatile("" ::: "memory");                                                             \
        }                                                                                                  \
        memcpy(target + done, source + done, nbytes - done);                                               \
    }

static void copy_by_16 COPIES_BY(16)
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void copy_by_32 COPIES_BY(32)
#endif

static void (*copy)(char *, const char *, uint64_t) = copy_by_16; /* the best that this processor has */

/* Return whether a message may go or come now: no refusal is known, nobody else is at it. */
static int may_begin(const End *self) {
    PyObject *quiet = PyObject_GetAttr(self->objects[ENGINE], name_is_quiet);
    Py_XDECREF(quiet);
    int is_free = quiet == Py_True;
    for (int which = BUSY_LOCKED; is_free && which <= BOX_LOCKED; which += BOX_LOCKED - BUSY_LOCKED) {
        PyObject *locked = PyObject_CallNoArgs(self->objects[which]);
        Py_XDECREF(locked);
        is_free = locked == Py_False;
    }
    if (PyErr_Occurred()) PyErr_Clear(); /* Python will say what is wrong */
    return is_free;
}

static int is_of(const End *self, const Sort *sort, PyObject *value, int flags) {
    if (sort->told == NULL || (PyObject *)Py_TYPE(value) != self->objects[ARRAY_TYPE]) return 0;
    const Array *array = (const Array *)value;
    if (array->dtype != sort->dtype || array->ndim != sort->ndim || (array->flags & flags) != flags) return 0;
    for (int axis = 0; axis < sort->ndim; axis++)
        if (array->shape[axis] != sort->shape[axis]) return 0;
    return 1;
}

/* Add a message to the flight recorder. */
static int note(End *self, const Sort *sort, long long call, int64_t begin) {
    PyObject *entry = PyTuple_New(5);
    if (entry == NULL) return -1;
    PyTuple_SetItem(entry, 0, Py_NewRef(sort->told));
    PyTuple_SetItem(entry, 1, PyLong_FromLongLong(call));
    PyTuple_SetItem(entry, 2, PyLong_FromLongLong(begin));
    PyTuple_SetItem(entry, 3, PyLong_FromLongLong(now_ns()));
    PyTuple_SetItem(entry, 4, PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    PyObject *added = PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(self->objects[ADD], entry, NULL);
    Py_DECREF(entry);
    Py_XDECREF(added);
    return added == NULL ? -1 : 0;
}

static Count *count_of(const End *self) { return (Count *)self->objects[COUNT]; }

/* -- sending ------------------------------------------------------------------------------------------------------- */

/* Return whether there is room for an entry of a length now, behind a gap. */
static int has_room(End *self, uint64_t length, uint64_t *gap) {
    const uint64_t filled = self->words[FILLED], place = filled % self->ring_bytes;
    *gap = place + length > self->ring_bytes ? self->ring_bytes - place : 0;
    if (filled + *gap + length - self->used <= self->ring_bytes) return 1;
    if (seen(self->words + FULL)) return 0;
    self->used = seen(self->words + USED);
    return filled + *gap + length - self->used <= self->ring_bytes;
}

/* Write the head of an entry, behind a gap if need be; return where it begins. */
static uint64_t *begin_entry(End *self, uint64_t length, uint64_t gap, uint64_t what, uint64_t call, uint64_t nbytes) {
    uint64_t filled = self->words[FILLED];
    if (gap) {
        uint64_t *before = (uint64_t *)(self->ring + filled % self->ring_bytes);
        before[LENGTH] = gap;
        before[WHAT] = GAP;
        store(self->words + FILLED, filled += gap);
    }
    uint64_t *entry = (uint64_t *)(self->ring + filled % self->ring_bytes);
    entry[LENGTH] = length;
    entry[WHAT] = what;
    entry[STREAM] = self->identity;
    entry[CALL] = call;
    entry[NBYTES] = nbytes;
    return entry;
}

static void end_entry(End *self, uint64_t filled) {
    store(self->words + FILLED, filled);
    store(self->words + NEWS, self->words[NEWS] + 1);
}

static void put(End *self, const Sort *sort, uint64_t call, const char *data, uint64_t gap) {
    const uint64_t at = data_at(sort->ndim, sort->nbytes), length = in_lines(at + sort->nbytes);
    uint64_t *entry = begin_entry(self, length, gap, sort->what | WHOLE, call, sort->nbytes);
    const uint64_t filled = self->words[FILLED];
    char *start = (char *)entry + at;
    for (int axis = 0; axis < sort->ndim; axis++) entry[SHAPE + axis] = (uint64_t)sort->shape[axis];
    uint64_t done = 0;
    while (sort->nbytes - done > PIECE) {
        copy(start + done, data + done, PIECE);
        done += PIECE;
        store(self->words + FILLED, filled + (at + done) / LINE * LINE);
    }
    copy(start + done, data + done, sort->nbytes - done);
    end_entry(self, filled + length);
}

static int acquire(PyObject *method) {
    PyObject *made = PyObject_CallFunctionObjArgs(method, Py_False, NULL); /* it does not wait */
    Py_XDECREF(made);
    return made == Py_True;
}

static void release(PyObject *method) {
    PyObject *made = PyObject_CallNoArgs(method);
    Py_XDECREF(made);
}

/* Lock this end, for what is done without the interpreter's lock; nothing of Python runs meanwhile. */
static int hold(const End *self) {
    if (!acquire(self->objects[BUSY_ACQUIRE])) return 0;
    if (acquire(self->objects[BOX_ACQUIRE])) return 1;
    release(self->objects[BUSY_RELEASE]);
    return 0;
}

static void let_go(const End *self) {
    release(self->objects[BOX_RELEASE]);
    release(self->objects[BUSY_RELEASE]);
}

/* Let Python go on with a long message of which so many bytes have gone or come; it lets go of the box. */
static PyObject *go_on(const End *self, PyObject *array, long long call, int64_t begin, uint64_t number, uint64_t done) {
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    if (PyErr_CheckSignals() < 0) {
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
    }
    PyObject *made = PyObject_CallFunction(
        self->objects[GO_ON], "OLLKKO", array, call, (long long)begin, (unsigned long long)number, (unsigned long long)done,
        error == NULL ? Py_None : error
    );
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Fetch(&type, &error, &trace);
    release(self->objects[BUSY_RELEASE]);
    PyErr_Restore(type, error, trace);
    return made;
}

/* Look until a word is at least so far, for a while, without the interpreter's lock; return where it is then. */
static uint64_t wait_long(const End *self, const uint64_t *word, uint64_t need) {
    int64_t until = 0;
    uint64_t value = 0;
    while (1) {
        for (int looks = 0; looks <= self->looks; looks++) {
            if ((value = seen(word)) >= need) return value;
            RELAX();
        }
        const int64_t now = now_ns();
        if (until == 0) until = now + self->patience_ns;
        if (now >= until || seen(self->abort)) return value;
        sched_yield();
    }
}

/* Put a long message in by parts, while the receiver takes them; return how many bytes have gone. */
static uint64_t pour(End *self, uint64_t call, const char *data, uint64_t nbytes) {
    uint64_t gone = 0, gap;
    while (gone < nbytes) {
        const uint64_t part = nbytes - gone < PART_BYTES ? nbytes - gone : PART_BYTES, at = data_at(1, part);
        const uint64_t length = in_lines(at + part);
        while (!has_room(self, length, &gap)) {
            const uint64_t need = self->words[FILLED] + gap + length - self->ring_bytes;
            if (seen(self->words + FULL) || wait_long(self, self->words + USED, need) < need) return gone;
        }
        uint64_t *entry = begin_entry(self, length, gap, PART, call, part);
        entry[START] = gone;
        copy((char *)entry + at, data + gone, part);
        end_entry(self, self->words[FILLED] + length);
        gone += part;
    }
    return gone;
}

static PyObject *send_long(End *self, const Sort *sort, PyObject *x) {
    uint64_t *words = self->words, number = words[NUMBER] + 1, gap;
    const uint64_t length = in_lines(8 * (SHAPE + (uint64_t)sort->ndim + 3)), before = number - PLACES;
    if (number > PLACES && seen(words + ANSWERS + before % PLACES) < before << 1 && words[GIVEN_UP + before % PLACES] != before)
        Py_RETURN_FALSE;
    if (self->looks == 0 || sort->nbytes > LONG_BYTES || PyList_Size(self->objects[SHARED]) || !has_room(self, length, &gap)) Py_RETURN_FALSE;
    Count *count = count_of(self);
    const long long call = count->number;
    if (!hold(self)) Py_RETURN_FALSE;
    const int64_t begin = now_ns();
    const char *data = ((Array *)x)->data, *memory = self->memory.buf;
    const uint64_t offset = data >= memory && data < memory + self->memory.len ? (uint64_t)(data - memory) + 1 : 0;
    count->next_call = count->number = call + 1;
    words[NUMBER] = number;
    store(words + ATTENDED, number);
    uint64_t *entry = begin_entry(self, length, gap, sort->what | TOLD, (uint64_t)call, sort->nbytes);
    for (int axis = 0; axis < sort->ndim; axis++) entry[SHAPE + axis] = (uint64_t)sort->shape[axis];
    entry[SHAPE + sort->ndim] = (uint64_t)(uintptr_t)data;
    entry[SHAPE + sort->ndim + 1] = offset;
    entry[SHAPE + sort->ndim + 2] = number;
    end_entry(self, words[FILLED] + length);
    uint64_t answer, gone = 0;
    Py_BEGIN_ALLOW_THREADS
    answer = wait_long(self, words + ANSWERS + number % PLACES, (number << 1) - 1);
    if (answer == (number << 1) - 1) gone = pour(self, (uint64_t)call, data, sort->nbytes);
    Py_END_ALLOW_THREADS
    store(words + ATTENDED, 0);
    if (answer < number << 1 && gone < sort->nbytes) {
        PyObject *made = go_on(self, x, call, begin, number, gone);
        Py_XDECREF(made);
        return made == NULL ? NULL : Py_NewRef(Py_True);
    }
    if (gone) store(words + GIVEN_UP + number % PLACES, number); /* its place may be used again */
    let_go(self);
    if (note(self, sort, call, begin) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *send_now(PyObject *object, PyObject *x) {
    End *self = (End *)object;
    const Sort *sort = NULL;
    for (int which = 0; which < SORTS && sort == NULL; which++)
        if (is_of(self, &self->sorts[which], x, IN_ONE_PIECE | ALIGNED)) sort = &self->sorts[which];
    if (sort == NULL || !may_begin(self)) Py_RETURN_FALSE;
    if (sort->nbytes > self->eager_bytes) return send_long(self, sort, x);

    const uint64_t length = in_lines(data_at(sort->ndim, sort->nbytes) + sort->nbytes);
    uint64_t gap;
    if (length > self->entry_bytes_max || !has_room(self, length, &gap)) Py_RETURN_FALSE;
    Count *count = count_of(self);
    const long long call = count->number;
    const int64_t begin = now_ns();
    count->next_call = count->number = call + 1;
    put(self, sort, (uint64_t)call, ((Array *)x)->data, gap);
    if (note(self, sort, call, begin) < 0) return NULL;
    Py_RETURN_TRUE;
}

/* -- receiving ----------------------------------------------------------------------------------------------------- */

/* Wait a short while until FILLED is at least so far; return where it is then. */
static uint64_t wait_for(const End *self, uint64_t need) {
    int64_t until = 0;
    int looks = 0;
    uint64_t filled;
    while ((filled = seen(self->words + FILLED)) < need) {
        if (++looks <= self->looks) {
            RELAX();
            continue;
        }
        if (!self->shares_cores || seen(self->abort)) break;
        const int64_t now = now_ns();
        if (until == 0) until = now + YIELD_NS;
        if (now >= until) break;
        looks = 0;
        sched_yield();
    }
    return filled;
}

/* Copy the bytes of an entry as they come; return whether all have. */
static int take(const End *self, uint64_t used, const Sort *sort, char *target) {
    const uint64_t at = data_at(sort->ndim, sort->nbytes), length = in_lines(at + sort->nbytes);
    const char *start = self->ring + used % self->ring_bytes + at;
    uint64_t done = 0;
    while (1) {
        const uint64_t there = seen(self->words + FILLED) - used;
        uint64_t ready = there >= length ? sort->nbytes : there > at ? there - at : 0;
        copy(target + done, start + done, ready - done);
        done = ready;
        if (there >= length) return 1;
        if (wait_for(self, used + there + 1) <= used + there) return 0;
    }
}

/* Take the parts of a long message as they come; return how many bytes have. */
static uint64_t take_parts(const End *self, uint64_t call, char *target, uint64_t nbytes) {
    uint64_t done = 0, used = self->words[USED];
    while (done < nbytes) {
        const uint64_t there = wait_long(self, self->words + FILLED, used + 1) - used;
        const char *start = self->ring + used % self->ring_bytes;
        const uint64_t *entry = (const uint64_t *)start;
        if (there == 0 || entry[LENGTH] > there) break;
        if ((entry[WHAT] & 0xFF) != GAP) {
            const uint64_t part = entry[NBYTES], at = data_at(1, part);
            if ((entry[WHAT] & 0xFF) != PART || entry[STREAM] != self->identity || entry[CALL] != call || entry[START] != done) break;
            if (part > nbytes - done || in_lines(at + part) != entry[LENGTH] || used % self->ring_bytes + entry[LENGTH] > self->ring_bytes)
                break;
            copy(target + done, start + at, part);
            done += part;
        }
        used += entry[LENGTH];
        store(self->words + USED, used);
    }
    return done;
}

/* Receive a long message, of which the oldest entry tells. */
static PyObject *receive_long(End *self, const Sort *sort, PyObject *made, long long call, int64_t begin) {
    uint64_t *words = self->words;
    const uint64_t used = words[USED], *entry = (const uint64_t *)(self->ring + used % self->ring_bytes);
    const uint64_t number = entry[SHAPE + sort->ndim + 2];
    Count *count = count_of(self);
    if (self->looks == 0 || sort->nbytes > LONG_BYTES || number == 0 || seen(words + ATTENDED) != number) Py_RETURN_NONE;
    if (!hold(self)) Py_RETURN_NONE;
    count->number = call + 1;
    store(words + USED, used + entry[LENGTH]);
    uint64_t done;
    Py_BEGIN_ALLOW_THREADS
    store(words + ANSWERS + number % PLACES, (number << 1) - 1);
    done = take_parts(self, (uint64_t)call, ((Array *)made)->data, sort->nbytes);
    Py_END_ALLOW_THREADS
    if (done < sort->nbytes) return go_on(self, made, call, begin, number, done);
    count->next_call = call + 1;
    let_go(self);
    return note(self, sort, call, begin) < 0 ? NULL : Py_NewRef(made);
}

static PyObject *receive_now(PyObject *object, PyObject *out) {
    End *self = (End *)object;
    if (!may_begin(self) || PyDict_Size(self->objects[KEPT]) || PyList_Size(self->objects[SHARED])) Py_RETURN_NONE;
    const int64_t begin = now_ns();
    Count *count = count_of(self);
    const long long call = count->number;
    uint64_t used = self->words[USED];
    uint64_t *entry;
    while (1) {
        if (wait_for(self, used + 1) <= used) Py_RETURN_NONE;
        entry = (uint64_t *)(self->ring + used % self->ring_bytes);
        if ((entry[WHAT] & 0xFF) != GAP) break;
        used += entry[LENGTH];
        store(self->words + USED, used);
    }
    PyObject *made = NULL, *result = NULL;
    const uint64_t form = entry[WHAT] & 0xFF;
    if ((form != WHOLE && form != TOLD) || entry[STREAM] != self->identity || entry[CALL] != (uint64_t)call) goto unusual;
    const Sort *sort = NULL;
    for (int which = 0; which < SORTS && sort == NULL; which++) {
        const Sort *one = &self->sorts[which];
        if (one->told == NULL || (one->what | form) != entry[WHAT] || one->nbytes != entry[NBYTES]) continue;
        sort = one;
        for (int axis = 0; axis < one->ndim; axis++)
            if ((uint64_t)one->shape[axis] != entry[SHAPE + axis]) sort = NULL;
    }
    if (sort == NULL) goto unusual;
    const uint64_t length = in_lines(form == WHOLE ? data_at(sort->ndim, sort->nbytes) + sort->nbytes : 8 * (SHAPE + (uint64_t)sort->ndim + 3));
    if (length > self->ring_bytes - used % self->ring_bytes) goto unusual;
    if (out != Py_None) {
        if (!is_of(self, sort, out, IN_ONE_PIECE | ALIGNED | WRITEABLE)) goto unusual;
        made = Py_NewRef(out);
    } else {
        made = PyObject_CallFunctionObjArgs(self->objects[MAKE], sort->shape_object, sort->dtype, NULL);
        if (made == NULL) goto done;
        /* That may have run other threads, or the collector of garbage; from here on nothing does. */
        if (count->number != call || self->words[USED] != used || sort->told == NULL || !may_begin(self)) goto unusual;
    }
    if (form == TOLD) {
        result = receive_long(self, sort, made, call, begin);
        goto done;
    }
    if (!take(self, used, sort, ((Array *)made)->data)) goto unusual;
    count->next_call = count->number = call + 1;
    store(self->words + USED, used + entry[LENGTH]);
    if (note(self, sort, call, begin) == 0) result = Py_NewRef(made);
    goto done;
unusual:
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(made);
    return result;
}

/* -- how far they are ----------------------------------------------------------------------------------------------- */

static PyMemberDef count_members[] = {
    {"identity", T_OBJECT_EX, offsetof(Count, identity), READONLY, NULL},
    {"next_call", T_LONGLONG, offsetof(Count, next_call), 0, NULL},
    {"number", T_LONGLONG, offsetof(Count, number), 0, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Count, references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *count_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *identity;
    long long next_call;
    if (keywords != NULL || !PyArg_ParseTuple(arguments, "OL", &identity, &next_call)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Count *self = (Count *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->identity = Py_NewRef(identity);
    self->next_call = self->number = next_call;
    return (PyObject *)self;
}

static void count_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    if (((Count *)object)->references != NULL) PyObject_ClearWeakRefs(object);
    Py_CLEAR(((Count *)object)->identity);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyType_Slot count_slots[] = {
    {Py_tp_new, count_new},
    {Py_tp_dealloc, count_dealloc},
    {Py_tp_members, count_members},
    {Py_tp_doc, "How far the messages of a pair and tag are."},
    {0, NULL},
};

static PyType_Spec count_spec = {"syncvar.kernel.messages.Count", sizeof(Count), 0, Py_TPFLAGS_DEFAULT, count_slots};

/* -- making one ---------------------------------------------------------------------------------------------------- */

/* remember(dtype, shape, what, nbytes, told): messages of this dtype and shape are taken from now on. */
static PyObject *remember(PyObject *object, PyObject *arguments) {
    End *self = (End *)object;
    PyObject *dtype, *shape, *told;
    unsigned long long what, nbytes;
    if (!PyArg_ParseTuple(arguments, "OO!KKO", &dtype, &PyTuple_Type, &shape, &what, &nbytes, &told)) return NULL;
    Sort made = {dtype, shape, told, what, (int)PyTuple_Size(shape), {0}, nbytes};
    if (PyTuple_Size(shape) > NDIM_MAX) Py_RETURN_NONE;
    for (int axis = 0; axis < made.ndim; axis++) made.shape[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
    if (PyErr_Occurred()) return NULL;
    for (int which = 0; which < SORTS; which++) {
        const Sort *one = &self->sorts[which];
        int is_same = one->told != NULL && one->dtype == dtype && one->ndim == made.ndim && one->what == what;
        for (int axis = 0; is_same && axis < made.ndim; axis++) is_same = one->shape[axis] == made.shape[axis];
        if (is_same) Py_RETURN_NONE;
    }
    Sort *place = &self->sorts[self->next_sort++ % SORTS], before = *place;
    Py_INCREF(dtype);
    Py_INCREF(shape);
    Py_INCREF(told);
    *place = made;
    Py_XDECREF(before.dtype);
    Py_XDECREF(before.shape_object);
    Py_XDECREF(before.told);
    Py_RETURN_NONE;
}

static int end_traverse(PyObject *object, visitproc visit, void *arg) {
    End *self = (End *)object;
    Py_VISIT(Py_TYPE(object));
    for (int which = 0; which < OBJECTS; which++) Py_VISIT(self->objects[which]);
    for (int which = 0; which < SORTS; which++) {
        Py_VISIT(self->sorts[which].dtype);
        Py_VISIT(self->sorts[which].shape_object);
        Py_VISIT(self->sorts[which].told);
    }
    return 0;
}

static int end_clear(PyObject *object) {
    End *self = (End *)object;
    for (int which = 0; which < SORTS; which++) {
        Py_CLEAR(self->sorts[which].told);
        Py_CLEAR(self->sorts[which].dtype);
        Py_CLEAR(self->sorts[which].shape_object);
    }
    for (int which = 0; which < OBJECTS; which++) Py_CLEAR(self->objects[which]);
    return 0;
}

static void forget(End *end) {
    Door *door = end->door;
    if (door == NULL) return;
    end->door = NULL;
    for (int place = 0; place < REMEMBERED; place++)
        if (door->ends[place].end == end) door->ends[place].end = NULL;
    Py_DECREF((PyObject *)door);
}

static void end_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    forget((End *)object);
    end_clear(object);
    if (((End *)object)->has_memory) PyBuffer_Release(&((End *)object)->memory);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* End(memory, box, ring, ring_bytes, entry_bytes_max, eager_bytes, abort, identity, looks, shares_cores, patience_ns, objects): box, ring and
 * abort are bytes from the beginning of the memory. */
static PyObject *end_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *memory, *objects;
    unsigned long long box, ring, ring_bytes, entry_bytes_max, eager_bytes, abort_at, identity;
    int looks, shares_cores;
    long long patience_ns;
    if (keywords != NULL && PyDict_Size(keywords)) {
        PyErr_SetString(PyExc_TypeError, "an end takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(
            arguments, "OKKKKKKKiiLO!", &memory, &box, &ring, &ring_bytes, &entry_bytes_max, &eager_bytes, &abort_at, &identity, &looks,
            &shares_cores, &patience_ns, &PyTuple_Type, &objects
        ))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    End *self = (End *)allocate(type, 0);
    if (self == NULL) return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) goto failed;
    self->has_memory = 1;
    const uint64_t whole = (uint64_t)self->memory.len;
    if (PyTuple_Size(objects) != OBJECTS || Py_TYPE(PyTuple_GetItem(objects, COUNT)) != count_type || ring_bytes == 0 || ring_bytes % LINE || ring % LINE || box % LINE || abort_at % 8 ||
        ring_bytes > whole || ring > whole - ring_bytes || box > whole - 4 * LINE || abort_at > whole - 8 ||
        entry_bytes_max > ring_bytes) {
        PyErr_SetString(PyExc_ValueError, "the box does not lie in this memory");
        goto failed;
    }
    char *start = self->memory.buf;
    self->words = (uint64_t *)(start + box);
    self->ring = start + ring;
    self->abort = (uint64_t *)(start + abort_at);
    self->ring_bytes = ring_bytes;
    self->entry_bytes_max = entry_bytes_max;
    self->eager_bytes = eager_bytes;
    self->identity = identity;
    self->used = seen(self->words + USED);
    self->looks = looks;
    self->shares_cores = shares_cores;
    self->patience_ns = patience_ns;
    for (int which = 0; which < OBJECTS; which++) self->objects[which] = Py_NewRef(PyTuple_GetItem(objects, which));
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef end_methods[] = {
    {"send", send_now, METH_O, "send(x): True when the message is in the box, False when nothing has been done"},
    {"receive", receive_now, METH_O, "receive(out): the message, or None when nothing has been done"},
    {"remember", remember, METH_VARARGS, "remember(dtype, shape, what, nbytes, told)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot end_slots[] = {
    {Py_tp_new, end_new},
    {Py_tp_dealloc, end_dealloc},
    {Py_tp_traverse, end_traverse},
    {Py_tp_clear, end_clear},
    {Py_tp_methods, end_methods},
    {Py_tp_doc, "One end of the messages of a pair and tag."},
    {0, NULL},
};

static PyType_Spec end_spec = {"syncvar.kernel.messages.End", sizeof(End), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, end_slots};

/* -- the door: send and recv ---------------------------------------------------------------------------------------- */

static unsigned place_of(long long peer, long long tag) {
    return (unsigned)((unsigned long long)peer * 31 + (unsigned long long)tag) % REMEMBERED;
}

/* Return a number, or -1 where the value is no plain integer of this range. */
static long long plain_number(PyObject *value) {
    if (Py_TYPE(value) != &PyLong_Type) return -1;
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) PyErr_Clear();
    return number;
}

/* Return an attribute without a reference of one's own: somebody else holds it as long as no Python runs. */
static PyObject *peek(PyObject *owner, PyObject *name) {
    PyObject *found = owner == NULL ? NULL : PyObject_GetAttr(owner, name);
    Py_XDECREF(found);
    return found;
}

/* Return whether an end is of this thread's world, outside a block of sv.uneven. That of a job that has been left refuses itself. */
static int is_current(const Door *self, const End *end) {
    const int same = peek(self->state, name_is_bound) == Py_False && peek(end->objects[CONTEXT], name_uneven) == Py_None;
    if (PyErr_Occurred()) PyErr_Clear();
    return same;
}

/* Return what the end makes of a call; None or False where the function has to make it, NULL for an error. */
static PyObject *through_end(Door *self, PyObject *arguments, PyObject *keywords) {
    const Py_ssize_t positions = self->is_sending ? 2 : 1;
    PyObject *out = Py_None, *name, *value;
    long long tag = 0;
    if (PyTuple_Size(arguments) != positions) Py_RETURN_NONE;
    if (keywords != NULL) {
        Py_ssize_t place = 0;
        while (PyDict_Next(keywords, &place, &name, &value)) {
            if (name == name_tag)
                tag = plain_number(value);
            else if (name == name_out && !self->is_sending)
                out = value;
            else
                Py_RETURN_NONE;
        }
    }
    const long long peer = plain_number(PyTuple_GetItem(arguments, positions - 1));
    if (peer < 0 || tag < 0) Py_RETURN_NONE;
    const unsigned place = place_of(peer, tag);
    End *end = self->ends[place].end;
    if (end == NULL || self->ends[place].peer != peer || self->ends[place].tag != tag) Py_RETURN_NONE;
    if (!is_current(self, end)) Py_RETURN_NONE;
    Py_INCREF((PyObject *)end);
    PyObject *made = self->is_sending ? send_now((PyObject *)end, PyTuple_GetItem(arguments, 0)) : receive_now((PyObject *)end, out);
    Py_DECREF((PyObject *)end);
    return made;
}

static PyObject *door_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    Door *self = (Door *)object;
    PyObject *made = through_end(self, arguments, keywords);
    if (made == Py_True) {
        Py_DECREF(made);
        Py_RETURN_NONE;
    }
    if (made != Py_None && made != Py_False) return made;
    Py_DECREF(made);
    return PyObject_Call(self->function, arguments, keywords);
}

/* remember(end, peer, tag): messages of the world with this peer and tag come and go here. */
static PyObject *door_remember(PyObject *object, PyObject *arguments) {
    Door *self = (Door *)object;
    PyObject *end;
    long long peer, tag;
    if (!PyArg_ParseTuple(arguments, "OLL", &end, &peer, &tag)) return NULL;
    if (Py_TYPE(end) == end_type && ((End *)end)->door == NULL) {
        const unsigned place = place_of(peer, tag);
        if (self->ends[place].end != NULL) forget(self->ends[place].end);
        self->ends[place].end = (End *)end;
        self->ends[place].peer = peer;
        self->ends[place].tag = tag;
        ((End *)end)->door = (Door *)Py_NewRef(object);
    }
    Py_RETURN_NONE;
}

static int door_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Door *)object)->function);
    Py_VISIT(((Door *)object)->state);
    return 0;
}

static int door_clear(PyObject *object) {
    Py_CLEAR(((Door *)object)->function);
    Py_CLEAR(((Door *)object)->state);
    return 0;
}

static void door_dealloc(PyObject *object) { /* no end remembers it any more: each holds it */
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    door_clear(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *door_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *function, *state;
    int is_sending;
    if (keywords != NULL || !PyArg_ParseTuple(arguments, "OOp", &function, &state, &is_sending)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Door *self = (Door *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->function = Py_NewRef(function);
    self->state = Py_NewRef(state);
    self->is_sending = is_sending;
    return (PyObject *)self;
}

/* All else is the function's: its name, documentation, signature. */
static PyObject *door_getattr(PyObject *object, PyObject *name) {
    static const char *const own[] = {"remember", "__class__", "__reduce__", "__reduce_ex__"};
    PyObject *function = ((Door *)object)->function;
    if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(function);
    for (size_t which = 0; which < sizeof own / sizeof *own; which++)
        if (PyUnicode_CompareWithASCIIString(name, own[which]) == 0) return PyObject_GenericGetAttr(object, name);
    return PyObject_GetAttr(function, name);
}

static PyObject *door_reduce(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyObject_GetAttrString(((Door *)object)->function, "__qualname__");
}

static PyObject *door_repr(PyObject *object) { return PyObject_Repr(((Door *)object)->function); }

static PyMethodDef door_methods[] = {
    {"remember", door_remember, METH_VARARGS, "remember(end, peer, tag)"},
    {"__reduce__", door_reduce, METH_NOARGS, "Functions are pickled by name."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot door_slots[] = {
    {Py_tp_new, door_new},
    {Py_tp_call, door_call},
    {Py_tp_dealloc, door_dealloc},
    {Py_tp_traverse, door_traverse},
    {Py_tp_clear, door_clear},
    {Py_tp_getattro, door_getattr},
    {Py_tp_repr, door_repr},
    {Py_tp_methods, door_methods},
    {Py_tp_doc, "send or recv: messages of the world that need no waiting take no step of Python; any other call is the function's."},
    {0, NULL},
};

static PyType_Spec door_spec = {"syncvar.kernel.messages.Door", sizeof(Door), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, door_slots};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddObjectRef(module, name, type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int prepare_module(PyObject *module) {
    PyObject **const names[] = {&name_is_quiet, &name_uneven, &name_is_bound, &name_tag, &name_out};
    static const char *const texts[] = {"is_quiet", "uneven", "is_bound", "tag", "out"};
    for (size_t which = 0; which < sizeof names / sizeof *names; which++)
        if ((*names[which] = PyUnicode_InternFromString(texts[which])) == NULL) return -1;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) copy = copy_by_32;
#endif
    end_type = add_type(module, &end_spec, "End");
    count_type = add_type(module, &count_spec, "Count");
    if (PyModule_AddIntConstant(module, "FORM", 2) < 0) return -1; /* `kernel` expects it: a change of what Python sees here is another */
    return end_type == NULL || count_type == NULL || add_type(module, &door_spec, "Door") == NULL ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, prepare_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "syncvar.kernel.messages", .m_doc = "Messages in C; see messages.c.", .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit_messages(void) { return PyModuleDef_Init(&definition); }
