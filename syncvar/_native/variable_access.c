/* Persistent writes and reads of variables: the C twins of syncvar/variables/variable_state.py
 * and grouped_writes.py. */
#include "native.h"

/* -- the copy of a variable -------------------------------------------------------------------- */

/* Cached attributes of a copy's storage. The references are borrowed: they are valid as long as
 * `moves` has not changed. */
typedef struct {
    long long moves, references;
    PyObject *array, *ground, *beneath;
} Laid;

/* Cache the attributes of a storage; 0 with an exception. */
static int look_at_copy(Laid *laid, CopyGuard *storage) {
    PyObject *references = PyObject_GetAttr((PyObject *)storage, name__references);
    laid->array = peek((PyObject *)storage, name_array);
    laid->ground = peek((PyObject *)storage, name__ground);
    laid->beneath = peek((PyObject *)storage, name__beneath);
    laid->references = references == NULL ? -1 : PyLong_AsLongLong(references);
    Py_XDECREF(references);
    const int is_moving = storage->moves % 2 != 0; /* another thread moves it */
    const int good = !is_moving && laid->array != NULL && laid->ground != NULL &&
                     laid->beneath != NULL && laid->references >= 0;
    laid->moves = good ? storage->moves : -1;
    return good;
}

/* Return whether a view of the copy is alive, as Storage.is_exposed does, which counts one more
 * reference to each object. */
static int is_exposed(const Laid *laid) {
    const long long count =
        (long long)(uint32_t)Py_REFCNT(laid->ground) + (uint32_t)Py_REFCNT(laid->beneath);
    return count + 2 > laid->references;
}

/* Return whether a copy is being written now: then Python has to make the read. */
static int is_changing(const CopyGuard *storage) {
    return storage->is_being_written || storage->changes != 0;
}

/* -- places ------------------------------------------------------------------------------------ */

/* The scope stacks, and the stack of the last thread. A thread keeps its stack, and thread ids are
 * never reused. */
typedef struct {
    PyObject *places, *stack;
    uint64_t thread;
} Stacks;

/* Find the strategy and the context of the innermost scope of this thread, borrowed; both NULL
 * outside every scope. Return 0 with an exception. */
static int find_place(Stacks *stacks, PyObject **owner, PyObject **context) {
    const uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    if (stacks->stack == NULL || stacks->thread != thread) {
        PyObject *found = PyObject_GetAttr(stacks->places, name_stack), *before = stacks->stack;
        if (found == NULL) return 0;
        stacks->stack = found;
        stacks->thread = thread;
        Py_XDECREF(before);
    }
    const Py_ssize_t depth = PyList_Size(stacks->stack);
    PyObject *place = depth > 0 ? PyList_GetItem(stacks->stack, depth - 1) : NULL;
    *owner = place == NULL ? NULL : PyTuple_GetItem(place, 0);
    *context = place == NULL ? NULL : PyTuple_GetItem(place, 1);
    return depth == 0 || (*owner != NULL && *context != NULL);
}

/* A persistent access of a variable; each type has its own vectorcall. */
typedef struct {
    PyObject_HEAD Vectorcall vectorcall;
    PyObject *plain, *owner; /* the Python fallback; the strategy */
    Stacks stacks;           /* None for a read that is always one of all replicas */
    CopyGuard *storage;
    VariableCounters *tally;
    PyObject *call, *communicator, *channel, *replica,
        *watch; /* for calls of all replicas; None for a Look */
    Form form;  /* dtype and shape of the copy */
    Laid laid;
    int is_default, is_increment; /* default strategy; counts for AUTO */
} Access;

typedef Access Write, Look, Read;

/* Fall back to Python, which raises the errors. */
static PyObject *leave(const Access *self, PyObject *const *arguments, size_t flagged,
                       PyObject *names) {
    PyErr_Clear();
    return call_function(self->plain, arguments, GIVEN(flagged), names);
}

/* The same for callers that do not use vectorcall. */
static PyObject *access_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    return PyObject_Call(((Access *)object)->plain, arguments, keywords);
}

/* Return the only argument of an access, NULL for other arguments. */
static PyObject *only_one(PyObject *const *arguments, size_t flagged, PyObject *names) {
    return GIVEN(flagged) == 1 && names == NULL ? arguments[0] : NULL;
}

/* Write(dtype, shape, is_default, is_increment, *, members); Look and Read likewise. */
static PyObject *access_new(PyTypeObject *type, Vectorcall vectorcall, PyObject *arguments,
                            PyObject *keywords) {
    PyObject *dtype, *shape;
    int is_default, is_increment;
    if (!PyArg_ParseTuple(arguments, "OOpp", &dtype, &shape, &is_default, &is_increment))
        return NULL;
    Access *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    self->vectorcall = vectorcall;
    self->is_default = is_default;
    self->is_increment = is_increment;
    self->laid.moves = -1;
    if (self->watch != Py_None && !PyObject_TypeCheck(self->watch, check_gate_type))
        PyErr_SetString(PyExc_TypeError, "watch must be a CheckGate, or None");
    else if (!PyObject_TypeCheck((PyObject *)self->storage, copy_guard_type) ||
             !PyObject_TypeCheck((PyObject *)self->tally, variable_counters_type))
        PyErr_SetString(PyExc_TypeError,
                        "storage must be a CopyGuard, and tally a VariableCounters");
    else if (type == read_type && Py_TYPE(self->call) != native_call_type)
        PyErr_SetString(PyExc_TypeError, "the call of a Read must be a NativeCall");
    else if (read_form(dtype, shape, &self->form))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef access_members[] = {
    HELD(Access, plain),
    HELD(Access, owner),
    HOLDS(Access, stacks.places, "places"),
    HOLDS(Access, stacks.stack, "_stack"),
    HELD(Access, storage),
    HELD(Access, tally),
    HELD(Access, call),
    HELD(Access, communicator),
    HELD(Access, channel),
    HELD(Access, replica),
    HELD(Access, watch),
    HOLDS(Access, form.dtype, "_dtype"),
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Access, vectorcall), READONLY, NULL},
    {NULL},
};

#define ACCESS(NAME, PREFIX, DOC)                                                                  \
    static PyObject *PREFIX##_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {   \
        return access_new(type, PREFIX##_call, arguments, keywords);                               \
    }                                                                                              \
    TYPE(NAME, PREFIX, access_members, Py_TPFLAGS_HAVE_GC | HAS_VECTORCALL, DOC,                   \
         {Py_tp_new, PREFIX##_new}, {Py_tp_call, access_call}, HOLDING)

/* -- writes ------------------------------------------------------------------------------------ */

/* Return whether the scope of this thread has each replica write its own values; set whether it is
 * outside every scope. */
static int is_in_place(Write *self, int *is_outside) {
    PyObject *owner, *context;
    if (!find_place(&self->stacks, &owner, &context)) return 0;
    *is_outside = owner == NULL;
    return owner == NULL ? self->is_default : owner == self->owner && context == self->replica;
}

/* Make a persistent call that applies its result to the copy. */
static PyObject *run_persistent(PyObject *call, PyObject *x, PyObject *array, PyObject *timeout) {
    if (Py_TYPE(call) == native_call_type) return run_call(call, x, array, Py_None, timeout);
    return PyObject_CallFunctionObjArgs(call, x, array, Py_None, timeout, NULL);
}

static PyObject *write_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                            PyObject *names) {
    Write *self = (Write *)object;
    const CheckGate *watch = (CheckGate *)self->watch;
    int is_outside = 0;
    enum StoreResult done = FALLBACK;
    PyObject *x = only_one(arguments, flagged, names), *timeout = NULL;
    if (x == NULL || !fits(&self->form, x, 0)) goto plain;
    if (!is_in_place(self, &is_outside) || peek(self->communicator, name_channel) != self->channel)
        goto plain;
    const int is_counted = self->watch != Py_None && !watch->is_free;
    if (is_counted && self->tally->steps >= watch->until) goto plain;
    if (self->storage->is_being_written)
        goto plain; /* by another thread, which may free the cached objects */
    if (self->laid.moves != self->storage->moves && !look_at_copy(&self->laid, self->storage))
        goto plain;
    timeout = PyObject_GetAttr(self->owner, name_timeout);
    if (timeout == NULL || is_exposed(&self->laid)) goto plain;
    PyObject *array = Py_NewRef(self->laid.array);
    self->storage->is_being_written = 1;
    PyObject *result = run_persistent(self->call, x, array, timeout);
    self->storage->is_being_written = 0;
    Py_DECREF(array);
    Py_DECREF(timeout);
    if (result == NULL) return NULL;
    if (result != Py_None) {
        self->tally->steps += is_counted; /* failed writes do not count, on any replica */
        self->tally->writes++;
        self->tally->collectives++;
        done = STORED;
        if (self->is_increment && ++self->tally->added % WRITES_PER_DECISION == 0 && is_outside)
            done = STORED_AND_SAMPLE;
    }
    Py_DECREF(result);
    return PyLong_FromLong(done);
plain:
    Py_XDECREF(timeout);
    return leave(self, arguments, flagged, names);
}

ACCESS(Write, write, "A persistent write of a variable: write(x) returns a StoreResult.")

/* -- reads of this replica's copy -------------------------------------------------------------- */

/* Look: an existing view is valid until the next write, a new one forever. A writer marks its write
 * before it checks for new views; so the new view must exist before this function reads the mark.
 */
static PyObject *look_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                           PyObject *names) {
    Look *self = (Look *)object;
    PyObject *storage = (PyObject *)self->storage, *owner, *context, *view = NULL,
             *copy = only_one(arguments, flagged, names);
    int usual = (copy == Py_True || copy == Py_False) &&
                find_place(&self->stacks, &owner, &context) &&
                (owner == NULL || owner == self->owner || self->is_default);
    if (usual && copy == Py_False) {
        view = PyObject_GetAttr(storage, name_view);
    } else if (usual) {
        PyObject *shown = PyObject_GetAttr(storage, name__shown);
        view = shown == NULL ? NULL : PyObject_GetItem(shown, Py_Ellipsis);
        Py_XDECREF(shown);
        if (is_changing(self->storage)) Py_CLEAR(view);
    }
    if (view == NULL) return leave(self, arguments, flagged, names);
    self->tally->turns += self->tally->added != self->tally->turned;
    self->tally->turned = self->tally->added;
    self->tally->reads++;
    return view;
}

ACCESS(Look, look,
       "A persistent read of this replica's copy: look(copy) returns None to fall back.")

/* -- reads that combine the copies ------------------------------------------------------------- */

/* Return whether a read here is one of all replicas: outside every scope, or in the strategy's own
 * scope outside of `run`. */
static int is_read_of_all(Read *self) {
    PyObject *owner, *context;
    if (self->stacks.places == Py_None) return 1;
    return find_place(&self->stacks, &owner, &context) &&
           (owner == NULL || (owner == self->owner && context != self->replica));
}

/* Read: the result is read-only, a view of an array that is not writeable. */
static PyObject *read_call(PyObject *object, PyObject *const *arguments, size_t flagged,
                           PyObject *names) {
    Read *self = (Read *)object;
    PyObject *storage = (PyObject *)self->storage, *held[3] = {NULL},
             *made = NULL; /* array, ground, timeout */
    int usual = is_read_of_all(self) && peek(self->communicator, name_channel) == self->channel &&
                peek(self->communicator, name_uneven) == Py_None;
    if (usual) {
        held[0] = PyObject_GetAttr(storage, name_array);
        held[1] = PyObject_GetAttr(
            storage, name__ground); /* this reference keeps writers away from the array */
        held[2] = PyObject_GetAttr(self->owner, name_timeout);
        usual =
            held[0] != NULL && held[1] != NULL && held[2] != NULL && !is_changing(self->storage);
    }
    if (usual) made = run_call(self->call, held[0], Py_None, Py_None, held[2]);
    for (int which = 0; which < 3; which++) Py_XDECREF(held[which]);
    if (!usual) return leave(self, arguments, flagged, names);
    if (made == NULL || made == Py_None) return made;
    self->tally->collectives++;
    self->tally->reads += self->stacks.places != Py_None;
    ((Array *)made)->flags &= ~WRITEABLE;
    PyObject *shown = PyObject_CallMethodObjArgs(made, name_view, NULL);
    Py_DECREF(made);
    return shown;
}

ACCESS(Read, read,
       "A persistent read that combines the copies: read(copy) returns None to fall back.")

/* -- variables that are written together ------------------------------------------------------- */

/* A variable of a flat bucket: its size, and its storage when the bucket was laid out. */
typedef struct {
    Py_ssize_t nbytes;
    Laid laid;
} Member;

typedef struct {
    PyObject_HEAD PyObject *variables, *storages, *tallies, *parts;
    Member *members;
    Py_ssize_t count;
    PyObject *kept_members;
} Group;

static CopyGuard *storage_of(const Group *self, Py_ssize_t place) {
    return (CopyGuard *)PyTuple_GetItem(self->storages, place);
}

/* Copy the values of (variable, value) pairs into the bucket; False if a pair does not fit. */
static PyObject *group_load(PyObject *object, PyObject *pairs) {
    Group *self = (Group *)object;
    const int flags = IN_ONE_PIECE | ALIGNED;
    int good = PyList_CheckExact(pairs) && PyList_Size(pairs) == self->count;
    for (Py_ssize_t place = 0; good && place < self->count; place++) {
        PyObject *pair = PyList_GetItem(pairs, place), *part = PyTuple_GetItem(self->parts, place);
        good = PyTuple_CheckExact(pair) && PyTuple_Size(pair) == 2 &&
               PyWeakref_GetObject(PyTuple_GetItem(self->variables, place)) ==
                   PyTuple_GetItem(pair, 0) &&
               (PyObject *)Py_TYPE(PyTuple_GetItem(pair, 1)) == array_type;
        if (!good) break;
        const Array *from = (const Array *)PyTuple_GetItem(pair, 1), *to = (const Array *)part;
        good = from->dtype == to->dtype && from->ndim == to->ndim &&
               (from->flags & flags) == flags &&
               memcmp(from->shape, to->shape, to->ndim * sizeof(intptr_t)) == 0;
        if (good) memcpy(to->data, from->data, self->members[place].nbytes);
    }
    PyErr_Clear();
    return PyBool_FromLong(good);
}

/* Record that the copies are in the bucket now. */
static PyObject *group_lay(PyObject *object, PyObject *unused) {
    (void)unused;
    Group *self = (Group *)object;
    for (Py_ssize_t place = 0; place < self->count; place++) {
        look_at_copy(&self->members[place].laid, storage_of(self, place));
        if (PyErr_Occurred()) return NULL;
    }
    Py_RETURN_NONE;
}

static void mark(const Group *self, char is_being_written) {
    for (Py_ssize_t place = 0; place < self->count; place++)
        storage_of(self, place)->is_being_written = is_being_written;
}

/* Mark the copies as being written. False, without marks, if a copy has left the bucket or a view
 * of one is alive. */
static PyObject *group_begin(PyObject *object, PyObject *unused) {
    (void)unused;
    const Group *self = (const Group *)object;
    int good = 1;
    for (Py_ssize_t place = 0; place < self->count; place++)
        if (storage_of(self, place)->is_being_written) Py_RETURN_FALSE; /* by another thread */
    mark(self, 1);
    for (Py_ssize_t place = 0; good && place < self->count; place++) {
        const Laid *laid = &self->members[place].laid;
        good = laid->moves == storage_of(self, place)->moves && !is_exposed(laid);
    }
    if (!good) mark(self, 0);
    return PyBool_FromLong(good);
}

/* Remove the marks, and count the write if it was made. */
static PyObject *group_end(PyObject *object, PyObject *is_done) {
    const Group *self = (const Group *)object;
    mark(self, 0);
    for (Py_ssize_t place = 0; is_done == Py_True && place < self->count; place++) {
        VariableCounters *tally = (VariableCounters *)PyTuple_GetItem(self->tallies, place);
        tally->writes++;
        tally->collectives++;
    }
    Py_RETURN_NONE;
}

/* Group(nbytes, *, members): tuples of one length; the variables are weak references. */
static PyObject *group_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *nbytes;
    if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &nbytes)) return NULL;
    Group *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    const Py_ssize_t count = PyTuple_Size(nbytes);
    PyObject *const tuples[] = {self->variables, self->storages, self->tallies, self->parts};
    int good = 1;
    for (int tuple = 0; tuple < 4; tuple++)
        good = good && PyTuple_Check(tuples[tuple]) && PyTuple_Size(tuples[tuple]) == count;
    for (Py_ssize_t place = 0; good && place < count; place++)
        good = PyObject_TypeCheck(PyTuple_GetItem(self->storages, place), copy_guard_type) &&
               PyObject_TypeCheck(PyTuple_GetItem(self->tallies, place), variable_counters_type) &&
               (PyObject *)Py_TYPE(PyTuple_GetItem(self->parts, place)) == array_type;
    if (!good) {
        PyErr_SetString(
            PyExc_TypeError,
            "a group needs tuples of one length: references, storages, tallies, arrays, numbers");
    } else if ((self->members = new_room(&self->kept_members, count * sizeof(Member))) != NULL) {
        self->count = count;
        for (Py_ssize_t place = 0; place < count; place++) {
            self->members[place].laid.moves = -1;
            self->members[place].nbytes = PyLong_AsSsize_t(PyTuple_GetItem(nbytes, place));
        }
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef group_members[] = {
    HELD(Group, variables),
    HELD(Group, storages),
    HELD(Group, tallies),
    HELD(Group, parts),
    HOLDS(Group, kept_members, "_members"),
    {NULL},
};

static PyMethodDef group_methods[] = {
    {"load", group_load, METH_O,
     "Copy the values of (variable, value) pairs into the bucket; False if one does not fit."},
    {"lay", group_lay, METH_NOARGS, "Record that the copies are in the bucket."},
    {"begin", group_begin, METH_NOARGS,
     "Mark the copies as being written; False if they cannot be written in place."},
    {"end", group_end, METH_O, "Remove the marks, and count the write."},
    {NULL},
};

TYPE(Group, group, group_members, Py_TPFLAGS_HAVE_GC, "Variables that are written together.",
     {Py_tp_new, group_new}, {Py_tp_methods, group_methods}, HOLDING)
