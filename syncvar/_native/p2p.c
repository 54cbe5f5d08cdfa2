/* Fast path of send and recv through a message ring, for arrays whose dtype and shape are cached.
 * Every other message is left to `runtime/p2p_channel.py` before anything has changed.
 *
 * The bytes of an entry are stored before FILLED (release), and read after it (acquire). They are
 * read before USED is stored (release). A long entry is published piece by piece, so that the
 * receiver copies the first pieces while the sender writes the last ones. All this keeps the GIL.
 *
 * A long message waits for its receiver, and both ranks release the GIL. While the sender waits for
 * the answer, ATTENDED has the number of the message. A receiver that finds it there asks for
 * parts, which the sender writes while the receiver reads them. If either has to wait long, or
 * finds another entry, the engine continues from the byte that has been reached.
 */
#include "native.h"

#define PIECE 16384      /* bytes published at a time */
#define PART_BYTES 32768 /* bytes of a part of a long message */
/* Longer messages do not go by parts: they exceed the caches, so the receiver reads them alone. */
#define LONG_BYTES 8388608

#define BOX_NDIM_MAX 13 /* dimensions of a cached shape */
#define SORTS 16        /* cached (dtype, shape) of a pair and tag; a new one replaces the oldest */

/* Messages of one dtype and shape. */
typedef struct {
    Form form;
    PyObject *shape, *info; /* info: CallInfo; NULL: an empty entry */
    uint64_t what;
} Sort;

/* Endpoint of a pair and tag. */
typedef struct {
    PyObject_HEAD PyObject *face;
    CommunicatorState *stream, *count; /* numbers of the next message, and of the first not over */
    PyObject *engine, *context, *add, *go_on, *kept, *shared;
    PyObject *busy, *box; /* locks of the pair and tag, and of this side of the ring */
    long long peer, tag;  /* its cache key */
    int is_retired;       /* another endpoint counts the messages now */
    PyObject *kept_sorts; /* owner of the objects in `sorts` */
    Py_buffer memory;
    int has_memory;
    uint64_t *words; /* header of the ring */
    char *ring;
    uint64_t ring_bytes, entry_bytes_max, eager_bytes, identity, used; /* last seen value of USED */
    uint64_t *abort;
    Patience patience;
    Stores stores;
    int64_t patience_ns; /* longest wait without the GIL in a long message, before the engine
                            continues */
    Sort sorts[SORTS];
    int next_sort;
} End;

static uint64_t nbytes_of(const Sort *sort) { return (uint64_t)sort->form.nbytes; }

static uint64_t in_lines(uint64_t nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

/* Return the offset of the data in an entry. */
static uint64_t data_at(int ndim, uint64_t nbytes) {
    const uint64_t head = 8 * (SHAPE + (uint64_t)ndim);
    return nbytes < 1024 ? head : in_lines(head);
}

/* Return the length of the entry of a whole message. */
static uint64_t length_whole(const Sort *sort) {
    return in_lines(data_at(sort->form.ndim, nbytes_of(sort)) + nbytes_of(sort));
}

/* Return the length of the entry that locates a long message: its address, its offset in shared
 * memory, and its number follow the shape. */
static uint64_t length_told(const Sort *sort) {
    return in_lines(8 * (SHAPE + (uint64_t)sort->form.ndim + 3));
}

/* Return whether a message may begin: the engine admits it, and no other thread has the locks. */
static int may_begin(const End *self) {
    return !self->is_retired && is_free(self->engine, self->busy) && is_unlocked(self->box);
}

static int is_of(const Sort *sort, PyObject *value, int flags) {
    return sort->info != NULL && fits(&sort->form, value, flags);
}

/* Count a message that is over, and add it to the flight recorder. */
static int complete(End *self, const Sort *sort, long long call, int64_t begin) {
    self->count->next_call = self->stream->next_call = call + 1;
    PyObject *number = PyLong_FromLongLong(call), *since = PyLong_FromLongLong(begin);
    const int noted = record(self->add, sort->info, number, since, NULL, NULL);
    Py_XDECREF(number);
    Py_XDECREF(since);
    return noted;
}

/* -- sending ----------------------------------------------------------------------------------- */

/* Return whether there is room for an entry now, after a gap if it does not fit before the end. */
static int has_room(End *self, uint64_t length, uint64_t *gap) {
    const uint64_t filled = self->words[FILLED], place = filled % self->ring_bytes;
    *gap = place + length > self->ring_bytes ? self->ring_bytes - place : 0;
    if (filled + *gap + length - self->used <= self->ring_bytes) return 1;
    if (seen(self->words + FULL)) return 0;
    self->used = seen(self->words + USED);
    return filled + *gap + length - self->used <= self->ring_bytes;
}

/* Write the header of an entry, after a gap if there is one; return the entry. */
static uint64_t *begin_entry(End *self, uint64_t length, uint64_t gap, uint64_t what, uint64_t call,
                             uint64_t nbytes) {
    uint64_t filled = self->words[FILLED];
    if (gap) {
        uint64_t *before = (uint64_t *)(self->ring + filled % self->ring_bytes);
        before[LENGTH] = gap;
        before[TYPE_CODE] = GAP;
        store(self->words + FILLED, filled += gap);
    }
    uint64_t *entry = (uint64_t *)(self->ring + filled % self->ring_bytes);
    entry[LENGTH] = length;
    entry[TYPE_CODE] = what;
    entry[STREAM] = self->identity;
    entry[CALL] = call;
    entry[NBYTES] = nbytes;
    return entry;
}

/* Write the header of a message, with its shape. */
static uint64_t *begin_message(End *self, const Sort *sort, uint64_t form, uint64_t length,
                               uint64_t gap, long long call) {
    uint64_t *entry =
        begin_entry(self, length, gap, sort->what | form, (uint64_t)call, nbytes_of(sort));
    for (int axis = 0; axis < sort->form.ndim; axis++)
        entry[SHAPE + axis] = (uint64_t)sort->form.shape[axis];
    return entry;
}

static void end_entry(End *self, uint64_t filled) {
    store(self->words + FILLED, filled);
    store(self->words + NEWS, self->words[NEWS] + 1);
}

static void put(End *self, const Sort *sort, long long call, const char *data, uint64_t gap) {
    const uint64_t at = data_at(sort->form.ndim, nbytes_of(sort)), length = length_whole(sort);
    char *start = (char *)begin_message(self, sort, WHOLE, length, gap, call) + at;
    const uint64_t filled = self->words[FILLED];
    uint64_t done = 0;
    while (nbytes_of(sort) - done > PIECE) {
        copy_out(&self->stores, start + done, data + done, PIECE);
        done += PIECE;
        store(self->words + FILLED, filled + (at + done) / LINE * LINE);
    }
    copy_out(&self->stores, start + done, data + done, nbytes_of(sort) - done);
    end_entry(self, filled + length);
}

/* Take both locks of this endpoint, for work without the GIL. */
static int hold(const End *self) {
    const int taken = try_acquire(self->busy);
    if (taken > 0 && try_acquire(self->box) > 0) return 1;
    if (taken > 0) release(self->busy);
    PyErr_Clear(); /* the slow path raises the error again */
    return 0;
}

static void let_go(const End *self) {
    release(self->box);
    release(self->busy);
}

/* Let Python continue a long message after `done` bytes; it releases the lock of the ring. */
static PyObject *go_on(const End *self, PyObject *array, long long call, int64_t begin,
                       uint64_t number, uint64_t done) {
    PyObject *type = NULL, *error = NULL, *trace = NULL;
    if (PyErr_CheckSignals() < 0) {
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
    }
    PyObject *made = PyObject_CallFunction(self->go_on, "OLLKKO", array, call, begin, number, done,
                                           error == NULL ? Py_None : error);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    release(self->busy);
    return made;
}

/* Spin until a word is at least `need`; return its last value. */
static uint64_t wait_until(End *self, const uint64_t *word, uint64_t need, int64_t patience_ns) {
    Wait wait = wait_with(&self->patience, self->abort, patience_ns);
    uint64_t value;
    while ((value = seen(word)) < need)
        if (!may_look_again(&wait)) return value;
    note_success(&wait);
    return value;
}

/* Spin until FILLED is at least `need`; return its last value. */
static uint64_t wait_for(End *self, uint64_t need) {
    return wait_until(self, self->words + FILLED, need, self->patience.shares_cores ? YIELD_NS : 0);
}

/* Send a long message by parts, while the receiver takes them; return how many bytes were sent. */
static uint64_t pour(End *self, uint64_t call, const char *data, uint64_t nbytes) {
    uint64_t gone = 0, gap;
    while (gone < nbytes) {
        const uint64_t part = nbytes - gone < PART_BYTES ? nbytes - gone : PART_BYTES,
                       at = data_at(1, part);
        const uint64_t length = in_lines(at + part);
        while (!has_room(self, length, &gap)) {
            const uint64_t need = self->words[FILLED] + gap + length - self->ring_bytes;
            if (seen(self->words + FULL) ||
                wait_until(self, self->words + USED, need, self->patience_ns) < need)
                return gone;
        }
        uint64_t *entry = begin_entry(self, length, gap, PART, call, part);
        entry[START] = gone;
        copy_out(&self->stores, (char *)entry + at, data + gone, part);
        end_entry(self, self->words[FILLED] + length);
        gone += part;
    }
    return gone;
}

static PyObject *send_long(End *self, const Sort *sort, PyObject *x) {
    uint64_t *words = self->words, number = words[NUMBER] + 1, gap;
    const uint64_t length = length_told(sort), before = number - PLACES;
    if (number > PLACES && seen(words + ANSWERS + before % PLACES) < before << 1 &&
        words[CANCELLED + before % PLACES] != before)
        Py_RETURN_FALSE;
    const long long call = self->stream->next_call;
    if (self->patience.looks == 0 || nbytes_of(sort) > LONG_BYTES || PyList_Size(self->shared) ||
        !has_room(self, length, &gap) || !hold(self))
        Py_RETURN_FALSE;
    const int64_t begin = now_ns();
    const char *data = ((Array *)x)->data, *memory = self->memory.buf;
    const uint64_t offset =
        data >= memory && data < memory + self->memory.len ? (uint64_t)(data - memory) + 1 : 0;
    self->count->next_call = self->stream->next_call = call + 1;
    words[NUMBER] = number;
    store(words + ATTENDED, number);
    uint64_t *place =
        begin_message(self, sort, BY_ADDRESS, length, gap, call) + SHAPE + sort->form.ndim;
    place[0] = (uint64_t)(uintptr_t)data;
    place[1] = offset;
    place[2] = number;
    end_entry(self, words[FILLED] + length);
    uint64_t answer, gone = 0;
    Py_BEGIN_ALLOW_THREADS
        answer = wait_until(self, words + ANSWERS + number % PLACES, (number << 1) - 1,
                            self->patience_ns);
        if (answer == (number << 1) - 1) gone = pour(self, (uint64_t)call, data, nbytes_of(sort));
    Py_END_ALLOW_THREADS
    store(words + ATTENDED, 0);
    if (answer < number << 1 && gone < nbytes_of(sort)) {
        PyObject *made = go_on(self, x, call, begin, number, gone);
        Py_XDECREF(made);
        return made == NULL ? NULL : Py_NewRef(Py_True);
    }
    if (gone) store(words + CANCELLED + number % PLACES, number); /* its place is free again */
    let_go(self);
    if (complete(self, sort, call, begin) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *send_now(PyObject *object, PyObject *x) {
    End *self = (End *)object;
    const Sort *sort = NULL;
    for (int which = 0; which < SORTS && sort == NULL; which++)
        if (is_of(&self->sorts[which], x, IN_ONE_PIECE | ALIGNED)) sort = &self->sorts[which];
    if (sort == NULL || !may_begin(self)) Py_RETURN_FALSE;
    if (nbytes_of(sort) > self->eager_bytes) return send_long(self, sort, x);

    const uint64_t length = length_whole(sort);
    uint64_t gap;
    if (length > self->entry_bytes_max || !has_room(self, length, &gap)) Py_RETURN_FALSE;
    const long long call = self->stream->next_call;
    const int64_t begin = now_ns();
    put(self, sort, call, ((Array *)x)->data, gap);
    if (complete(self, sort, call, begin) < 0) return NULL;
    Py_RETURN_TRUE;
}

/* -- receiving --------------------------------------------------------------------------------- */

/* Copy the data of an entry as it arrives; return whether all of it has. */
static int take(End *self, uint64_t used, const Sort *sort, char *target) {
    const uint64_t at = data_at(sort->form.ndim, nbytes_of(sort)), length = length_whole(sort);
    const char *start = self->ring + used % self->ring_bytes + at;
    uint64_t done = 0;
    while (1) {
        const uint64_t there = seen(self->words + FILLED) - used;
        uint64_t ready = there >= length ? nbytes_of(sort) : there > at ? there - at : 0;
        copy_bytes(target + done, start + done, ready - done);
        done = ready;
        if (there >= length) return 1;
        if (wait_for(self, used + there + 1) <= used + there) return 0;
    }
}

/* Copy the parts of a long message as they arrive; return how many bytes have. */
static uint64_t take_parts(End *self, uint64_t call, char *target, uint64_t nbytes) {
    uint64_t done = 0, used = self->words[USED];
    while (done < nbytes) {
        const uint64_t there =
            wait_until(self, self->words + FILLED, used + 1, self->patience_ns) - used;
        const char *start = self->ring + used % self->ring_bytes;
        const uint64_t *entry = (const uint64_t *)start;
        if (there == 0 || entry[LENGTH] > there) break;
        if ((entry[TYPE_CODE] & 0xFF) != GAP) {
            const uint64_t part = entry[NBYTES], at = data_at(1, part);
            if ((entry[TYPE_CODE] & 0xFF) != PART || entry[STREAM] != self->identity ||
                entry[CALL] != call || entry[START] != done)
                break;
            if (part > nbytes - done || in_lines(at + part) != entry[LENGTH] ||
                used % self->ring_bytes + entry[LENGTH] > self->ring_bytes)
                break;
            copy_bytes(target + done, start + at, part);
            done += part;
        }
        used += entry[LENGTH];
        store(self->words + USED, used);
    }
    return done;
}

/* Receive the long message that the oldest entry locates. */
static PyObject *receive_long(End *self, const Sort *sort, PyObject *made, long long call,
                              int64_t begin) {
    uint64_t *words = self->words;
    const uint64_t used = words[USED],
                   *entry = (const uint64_t *)(self->ring + used % self->ring_bytes);
    const uint64_t number = entry[SHAPE + sort->form.ndim + 2];
    if (self->patience.looks == 0 || nbytes_of(sort) > LONG_BYTES || number == 0 ||
        seen(words + ATTENDED) != number || !hold(self))
        Py_RETURN_NONE;
    self->stream->next_call = call + 1;
    store(words + USED, used + entry[LENGTH]);
    uint64_t done;
    Py_BEGIN_ALLOW_THREADS
        store(words + ANSWERS + number % PLACES, (number << 1) - 1);
        done = take_parts(self, (uint64_t)call, ((Array *)made)->data, nbytes_of(sort));
    Py_END_ALLOW_THREADS
    if (done < nbytes_of(sort)) return go_on(self, made, call, begin, number, done);
    let_go(self);
    return complete(self, sort, call, begin) < 0 ? NULL : Py_NewRef(made);
}

/* Return the oldest entry that is not a gap; NULL if none arrives while spinning. */
static const uint64_t *oldest_entry(End *self) {
    while (1) {
        const uint64_t used = self->words[USED];
        if (wait_for(self, used + 1) <= used) return NULL;
        const uint64_t *entry = (const uint64_t *)(self->ring + used % self->ring_bytes);
        if ((entry[TYPE_CODE] & 0xFF) != GAP) return entry;
        store(self->words + USED, used + entry[LENGTH]);
    }
}

/* Return the cached dtype and shape of an entry; NULL if there is none. */
static const Sort *sort_of(const End *self, const uint64_t *entry) {
    const uint64_t form = entry[TYPE_CODE] & 0xFF,
                   left = self->ring_bytes - self->words[USED] % self->ring_bytes;
    if (form != WHOLE && form != BY_ADDRESS) return NULL;
    for (int which = 0; which < SORTS; which++) {
        const Sort *one = &self->sorts[which];
        if (one->info == NULL || (one->what | form) != entry[TYPE_CODE] ||
            (uint64_t)one->form.nbytes != entry[NBYTES])
            continue;
        int same = (form == WHOLE ? length_whole(one) : length_told(one)) <= left;
        for (int axis = 0; same && axis < one->form.ndim; axis++)
            same = (uint64_t)one->form.shape[axis] == entry[SHAPE + axis];
        if (same) return one;
    }
    return NULL;
}

static PyObject *receive_now(PyObject *object, PyObject *out) {
    End *self = (End *)object;
    if (!may_begin(self) || PyDict_Size(self->kept) || PyList_Size(self->shared)) Py_RETURN_NONE;
    const int64_t begin = now_ns();
    const long long call = self->stream->next_call;
    const uint64_t *entry = oldest_entry(self);
    if (entry == NULL || entry[STREAM] != self->identity || entry[CALL] != (uint64_t)call)
        Py_RETURN_NONE;
    const uint64_t used = self->words[USED];
    const Sort *sort = sort_of(self, entry);
    if (sort == NULL || (out != Py_None && !is_of(sort, out, IN_ONE_PIECE | ALIGNED | WRITEABLE)))
        Py_RETURN_NONE;
    PyObject *made = out != Py_None ? Py_NewRef(out)
                                    : PyObject_CallFunctionObjArgs(make_array, sort->shape,
                                                                   sort->form.dtype, NULL);
    if (made == NULL) return NULL;
    PyObject *result = NULL;
    /* The code above may have run other threads, or the garbage collector; the code below does not.
     */
    if (out == Py_None && (self->stream->next_call != call || self->words[USED] != used ||
                           !is_of(sort, made, 0) || !may_begin(self))) {
        result = Py_NewRef(Py_None);
    } else if ((entry[TYPE_CODE] & 0xFF) == BY_ADDRESS) {
        result = receive_long(self, sort, made, call, begin);
    } else if (!take(self, used, sort, ((Array *)made)->data)) {
        result = Py_NewRef(Py_None);
    } else {
        store(self->words + USED, used + entry[LENGTH]);
        if (complete(self, sort, call, begin) == 0) result = Py_NewRef(made);
    }
    Py_DECREF(made);
    return result;
}

/* -- endpoints --------------------------------------------------------------------------------- */

/* remember(dtype, shape, what, info): cache a dtype and shape, which have one CallInfo `info`. */
static PyObject *end_remember(PyObject *object, PyObject *arguments) {
    End *self = (End *)object;
    PyObject *dtype, *shape, *info;
    unsigned long long what;
    if (!PyArg_ParseTuple(arguments, "OO!KO", &dtype, &PyTuple_Type, &shape, &what, &info))
        return NULL;
    int is_known = PyTuple_Size(shape) > BOX_NDIM_MAX;
    for (int which = 0; which < SORTS; which++) is_known |= self->sorts[which].info == info;
    if (is_known) Py_RETURN_NONE;
    Sort made = {.shape = shape, .info = info, .what = what};
    PyObject *held =
        read_form(dtype, shape, &made.form) ? PyTuple_Pack(3, dtype, shape, info) : NULL;
    Py_DECREF(made.form.dtype); /* `held` owns it */
    if (held == NULL) return NULL;
    const int place = self->next_sort++ % SORTS;
    self->sorts[place] = made;
    return PyList_SetItem(self->kept_sorts, place, held) < 0 ? NULL : Py_NewRef(Py_None);
}

/* retire(): stop sending and receiving, and leave the cache. */
static PyObject *end_retire(PyObject *object, PyObject *unused) {
    (void)unused;
    ((End *)object)->is_retired = 1;
    forget((Remembered *)object);
    Py_RETURN_NONE;
}

static int end_clear(PyObject *object) {
    End *self = (End *)object;
    forget((Remembered *)self);
    for (int which = 0; which < SORTS; which++) self->sorts[which].info = NULL;
    return clear_held(object);
}

static void end_dealloc(PyObject *object) {
    Py_buffer memory = ((End *)object)->memory;
    const int has_memory = ((End *)object)->has_memory;
    dealloc_held(object);
    if (has_memory) PyBuffer_Release(&memory);
}

/* End(memory, (box, ring_bytes, entry_bytes_max, eager_bytes, abort), identity, (looks,
 * shares_cores), patience_ns, *, members): box and abort are offsets in the memory. The entries
 * follow the four lines of the box. */
static PyObject *end_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *memory;
    unsigned long long box, ring_bytes, entry_bytes_max, eager_bytes, abort_at, identity;
    int looks, shares_cores;
    long long patience_ns;
    if (!PyArg_ParseTuple(arguments, "O(KKKKK)K(ip)L", &memory, &box, &ring_bytes, &entry_bytes_max,
                          &eager_bytes, &abort_at, &identity, &looks, &shares_cores, &patience_ns))
        return NULL;
    End *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    if ((self->kept_sorts = PyList_New(SORTS)) == NULL) goto failed;
    for (int which = 0; which < SORTS; which++)
        PyList_SetItem(self->kept_sorts, which, Py_NewRef(Py_None));
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) goto failed;
    self->has_memory = 1;
    const uint64_t whole = (uint64_t)self->memory.len;
    if (!PyObject_TypeCheck((PyObject *)self->count, communicator_state_type) ||
        !PyObject_TypeCheck((PyObject *)self->stream, communicator_state_type) || ring_bytes == 0 ||
        ring_bytes % LINE || box % LINE || abort_at % 8 || whole < 4 * LINE ||
        ring_bytes > whole - 4 * LINE || box > whole - 4 * LINE - ring_bytes ||
        abort_at > whole - 8 || entry_bytes_max > ring_bytes) {
        PyErr_SetString(PyExc_ValueError, "the message ring is not within this memory");
        goto failed;
    }
    char *start = self->memory.buf;
    self->words = (uint64_t *)(start + box);
    self->ring = start + box + 4 * LINE;
    self->abort = (uint64_t *)(start + abort_at);
    self->ring_bytes = ring_bytes;
    self->entry_bytes_max = entry_bytes_max;
    self->eager_bytes = eager_bytes;
    self->identity = identity;
    self->used = seen(self->words + USED);
    self->patience.looks = looks;
    self->patience.shares_cores = shares_cores;
    self->patience_ns = patience_ns;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef end_methods[] = {
    {"send", send_now, METH_O, "send(x): True if the message is in the ring, False to fall back"},
    {"receive", receive_now, METH_O, "receive(out): the message, or None to fall back"},
    {"remember", end_remember, METH_VARARGS, "remember(dtype, shape, what, info)"},
    {"retire", end_retire, METH_NOARGS, "retire(): stop sending and receiving"},
    {NULL},
};

static PyMemberDef end_members[] = {
    HELD(End, stream),
    HELD(End, count),
    HELD(End, engine),
    HELD(End, context),
    HELD(End, add),
    HELD(End, go_on),
    HELD(End, busy),
    HELD(End, box),
    HELD(End, kept),
    HELD(End, shared),
    HOLDS(End, face, "_face"),
    HOLDS(End, kept_sorts, "_sorts"),
    {NULL},
};

TYPE(End, end, end_members, Py_TPFLAGS_HAVE_GC, "Endpoint of the messages of a pair and tag.",
     {Py_tp_new, end_new}, {Py_tp_methods, end_methods}, {Py_tp_traverse, traverse_held},
     {Py_tp_clear, end_clear}, {Py_tp_dealloc, end_dealloc})

/* -- dispatch of send and recv ----------------------------------------------------------------- */

/* Replaces `send` or `recv`. */
typedef struct {
    Face face;
    int is_sending;
} MessageDispatch;

/* Return the cache entry of a peer and tag. */
static Remembered **place_of(MessageDispatch *self, long long peer, long long tag) {
    return self->face.remembered +
           ((unsigned long long)peer * 31 + (unsigned long long)tag) % REMEMBERED;
}

/* Return a number, or -1 if the value is not a plain integer of this range. */
static long long plain_number(PyObject *value) {
    if (Py_TYPE(value) != &PyLong_Type) return -1;
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) PyErr_Clear();
    return number;
}

/* Return whether an endpoint belongs to this thread's world, outside a block of sv.uneven. An
 * endpoint of a job that this process has left refuses calls by itself. */
static int is_current(const MessageDispatch *self, const End *end) {
    const int same = peek(self->face.state, name_is_bound) == Py_False &&
                     peek(end->context, name_uneven) == Py_None;
    if (PyErr_Occurred()) PyErr_Clear();
    return same;
}

/* Return the result of the endpoint; None or False if the function has to be called; NULL with an
 * exception. */
static PyObject *through_end(MessageDispatch *self, PyObject *const *arguments, Py_ssize_t given,
                             PyObject *names) {
    const Py_ssize_t positions = self->is_sending ? 2 : 1,
                     named = names == NULL ? 0 : PyTuple_Size(names);
    PyObject *out = Py_None;
    long long tag = 0;
    if (given != positions) Py_RETURN_NONE;
    for (Py_ssize_t place = 0; place < named; place++) {
        PyObject *name = PyTuple_GetItem(names, place), *value = arguments[given + place];
        if (name == name_tag)
            tag = plain_number(value);
        else if (name == name_out && !self->is_sending)
            out = value;
        else
            Py_RETURN_NONE;
    }
    const long long peer = plain_number(arguments[positions - 1]);
    if (peer < 0 || tag < 0) Py_RETURN_NONE;
    End *end = (End *)*place_of(self, peer, tag);
    if (end == NULL || end->peer != peer || end->tag != tag || !is_current(self, end))
        Py_RETURN_NONE;
    Py_INCREF((PyObject *)end);
    PyObject *made = self->is_sending ? send_now((PyObject *)end, arguments[0])
                                      : receive_now((PyObject *)end, out);
    Py_DECREF((PyObject *)end);
    return made;
}

static PyObject *message_dispatch_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                                       PyObject *names) {
    MessageDispatch *self = (MessageDispatch *)object;
    const Py_ssize_t given = GIVEN(flagged);
    PyObject *made = through_end(self, arguments, given, names);
    if (made == Py_True) {
        Py_DECREF(made);
        Py_RETURN_NONE;
    }
    if (made != Py_None && made != Py_False) return made;
    Py_DECREF(made);
    return call_function(self->face.function, arguments, given, names);
}

/* remember(end, peer, tag): cache the endpoint of a peer and tag in the world. */
static PyObject *message_dispatch_remember(PyObject *object, PyObject *arguments) {
    MessageDispatch *self = (MessageDispatch *)object;
    PyObject *end;
    long long peer, tag;
    if (!PyArg_ParseTuple(arguments, "OLL", &end, &peer, &tag)) return NULL;
    if (Py_TYPE(end) == end_type && ((End *)end)->face == NULL && !((End *)end)->is_retired) {
        ((End *)end)->peer = peer;
        ((End *)end)->tag = tag;
        remember(&self->face, place_of(self, peer, tag), (Remembered *)end);
    }
    Py_RETURN_NONE;
}

/* MessageDispatch(is_sending, *, members). */
static PyObject *message_dispatch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    int is_sending;
    if (!PyArg_ParseTuple(arguments, "p", &is_sending)) return NULL;
    MessageDispatch *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->is_sending = is_sending;
    self->face.vectorcall = message_dispatch_call;
    return (PyObject *)self;
}

static PyMethodDef message_dispatch_methods[] = {
    {"remember", message_dispatch_remember, METH_VARARGS, "remember(end, peer, tag)"},
    FACE_METHODS,
    {NULL},
};

static PyMemberDef message_dispatch_members[] = {HOLDS(MessageDispatch, face.function, "function"),
                                                 HOLDS(MessageDispatch, face.state, "state"),
                                                 CALLED_BY(MessageDispatch),
                                                 {NULL}};

/* Replaces send or recv: makes messages of the world in C, and calls the function for all others.
 */
TYPE(MessageDispatch, message_dispatch, message_dispatch_members,
     Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL, NULL, /* `__doc__` is the function's */
     {Py_tp_new, message_dispatch_new}, {Py_tp_methods, message_dispatch_methods}, FACE, HOLDING)
