/* Support for all objects of the extension: references, admission of calls, records, arrays. */
#include "native.h"

#define DEFINED(NAME) PyObject *name_##NAME;
NAMES(DEFINED)

int intern_names(void) {
#define INTERNED(NAME)                                                                             \
    if ((name_##NAME = PyUnicode_InternFromString(#NAME)) == NULL) return -1;
    NAMES(INTERNED)
    return 0;
}

/* -- references -------------------------------------------------------------------------------- */

static const PyMemberDef no_members[] = {{NULL}};

static const PyMemberDef *members_of(PyObject *object) {
    const PyMemberDef *members = PyType_GetSlot(Py_TYPE(object), Py_tp_members);
    return members == NULL ? no_members : members;
}

static PyObject **held_by(PyObject *object, const PyMemberDef *member) {
    return member->type == T_OBJECT ? (PyObject **)((char *)object + member->offset) : NULL;
}

int traverse_held(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    for (const PyMemberDef *member = members_of(object); member->name != NULL; member++)
        if (held_by(object, member) != NULL) Py_VISIT(*held_by(object, member));
    return 0;
}

int clear_held(PyObject *object) {
    for (const PyMemberDef *member = members_of(object); member->name != NULL; member++)
        if (held_by(object, member) != NULL) Py_CLEAR(*held_by(object, member));
    return 0;
}

/* Free an object, and its reference to its type. */
void dealloc_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* The same for an object with references, of a type without subclasses; it calls tp_clear. */
void dealloc_held(PyObject *object) {
    PyObject_GC_UnTrack(object);
    ((inquiry)PyType_GetSlot(Py_TYPE(object), Py_tp_clear))(object);
    dealloc_object(object);
}

void *new_object(PyTypeObject *type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* Make an object, and set its members from keyword arguments. */
void *new_holding(PyTypeObject *type, PyObject *keywords) {
    PyObject *self = new_object(type);
    Py_ssize_t wanted = 0;
    if (self == NULL) return NULL;
    for (const PyMemberDef *member = members_of(self); member->name != NULL; member++) {
        if (held_by(self, member) == NULL || member->name[0] == '_') continue;
        PyObject *value = keywords == NULL ? NULL : PyDict_GetItemString(keywords, member->name);
        if (value != NULL) *held_by(self, member) = Py_NewRef(value);
        wanted += value != NULL ? 1 : 1 << 16;
    }
    if (wanted == (keywords == NULL ? 0 : PyDict_Size(keywords))) return self;
    Py_DECREF(self);
    PyErr_SetString(
        PyExc_TypeError,
        "an object of the C extension takes exactly its public members as keyword arguments");
    return NULL;
}

/* Return memory that is freed with its holder; NULL with an exception. */
void *new_room(PyObject **holder, Py_ssize_t nbytes) {
    *holder = PyBytes_FromStringAndSize(NULL, nbytes);
    return *holder == NULL ? NULL : PyBytes_AsString(*holder);
}

/* -- attributes and locks ---------------------------------------------------------------------- */

/* Return 1 if an attribute is True, 0 for anything else, also if it is missing. */
int is_true(PyObject *owner, PyObject *name) {
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_True;
}

/* Return a borrowed reference to an attribute; its owner keeps it alive as long as no Python code
 * runs. NULL with an exception, or without an owner. */
PyObject *peek(PyObject *owner, PyObject *name) {
    PyObject *found = owner == NULL ? NULL : PyObject_GetAttr(owner, name);
    Py_XDECREF(found);
    return found;
}

int call_one(PyObject *owner, PyObject *name, PyObject *argument) {
    PyObject *done = PyObject_CallMethodObjArgs(owner, name, argument, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int is_unlocked(PyObject *lock) {
    PyObject *locked = PyObject_CallMethodObjArgs(lock, name_locked, NULL);
    Py_XDECREF(locked);
    if (locked == NULL) PyErr_Clear(); /* the slow path raises the error again */
    return locked == Py_False;
}

/* Return whether the engine admits calls, and no writes are queued. */
int is_quiet(PyObject *engine) {
    return PyObject_TypeCheck(engine, admission_state_type) && ((AdmissionState *)engine)->is_quiet;
}

/* Return whether a call may begin: the engine admits it, the lock is free, and this is no signal
 * handler of the thread that drives the engine. */
int is_free(PyObject *engine, PyObject *lock) {
    if (!is_quiet(engine) || !is_unlocked(lock)) return 0;
    const long long driver = ((AdmissionState *)engine)->driver;
    return driver == 0 || driver != (long long)PyThread_get_thread_ident();
}

/* Try to take a lock: 1 if taken, 0 if another thread has it, -1 with an exception. */
int try_acquire(PyObject *lock) {
    PyObject *taken = PyObject_CallMethodObjArgs(lock, name_acquire, Py_False, NULL);
    Py_XDECREF(taken);
    return taken == NULL ? -1 : taken == Py_True;
}

/* Release a lock; keep an exception that is set. */
void release(PyObject *lock) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (call_one(lock, name_release, NULL) < 0) PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Add an ended call to the flight recorder. NULL for number or began means an exception is set.
 * The one item of `add` is the recorder's method, which may change from call to call. `site` and
 * `instruction` say where a started call began; NULL for other calls. */
int record(PyObject *add, PyObject *info, PyObject *number, PyObject *began, PyObject *site,
           PyObject *instruction) {
    PyObject *end = PyLong_FromLongLong(now_ns()),
             *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    const int are_there = number != NULL && began != NULL && end != NULL && thread != NULL;
    PyObject *entry = NULL, *added = NULL;
    if (are_there)
        entry = site == NULL
                    ? PyTuple_Pack(5, info, number, began, end, thread)
                    : PyTuple_Pack(7, info, number, began, end, thread, site, instruction);
    if (entry != NULL) {
        PyObject *method = Py_XNewRef(PyList_GetItem(add, 0));
        if (method != NULL) added = PyObject_CallFunctionObjArgs(method, entry, NULL);
        Py_XDECREF(method);
    }
    Py_XDECREF(end);
    Py_XDECREF(thread);
    Py_XDECREF(entry);
    Py_XDECREF(added);
    return added == NULL ? -1 : 0;
}

/* -- records ----------------------------------------------------------------------------------- */

#define RECORD(NAME, PREFIX, DOC, ...)                                                             \
    static PyMemberDef PREFIX##_members[] = {__VA_ARGS__, {NULL}};                                 \
    TYPE(NAME, PREFIX, PREFIX##_members, Py_TPFLAGS_BASETYPE, DOC, {Py_tp_dealloc, dealloc_object})

RECORD(AdmissionState, admission_state,
       "Whether the engine admits calls, and which thread drives it.",
       FLAG(AdmissionState, is_quiet), NUMBER(AdmissionState, driver))
RECORD(CommunicatorState, communicator_state, "Number of the next call of a group.",
       NUMBER(CommunicatorState, next_call))
RECORD(VariableCounters, variable_counters, "Counters of a variable.",
       NUMBER(VariableCounters, writes), NUMBER(VariableCounters, collectives),
       NUMBER(VariableCounters, added), NUMBER(VariableCounters, steps),
       NUMBER(VariableCounters, reads), NUMBER(VariableCounters, turned),
       NUMBER(VariableCounters, turns))
RECORD(CheckGate, check_gate, "Which writes of variables need a check.", NUMBER(CheckGate, until),
       FLAG(CheckGate, is_free))
RECORD(CopyGuard, copy_guard, "Detects concurrent access to a variable's copy.",
       NUMBER(CopyGuard, moves), NUMBER(CopyGuard, changes), FLAG(CopyGuard, is_being_written))

/* -- arrays ------------------------------------------------------------------------------------ */

PyObject *array_type, *make_array, *as_array, *numpy_add;

int find_numpy(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) return -1;
    array_type = PyObject_GetAttrString(numpy, "ndarray");
    make_array = PyObject_GetAttrString(numpy, "empty");
    as_array = PyObject_GetAttrString(numpy, "asarray");
    numpy_add = PyObject_GetAttrString(numpy, "add");
    Py_DECREF(numpy);
    return array_type && make_array && as_array && numpy_add ? 0 : -1;
}

/* Read a tuple of numbers; return how many, or -1. */
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

/* Set a form to dtype, with a new reference, and shape. */
int read_form(PyObject *dtype, PyObject *shape, Form *form) {
    Py_ssize_t lengths[NDIM_MAX];
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

int fits_shape(PyObject *dtype, int ndim, const intptr_t *shape, PyObject *value, int flags) {
    if ((PyObject *)Py_TYPE(value) != array_type) return 0;
    const Array *array = (const Array *)value;
    if (array->dtype != dtype || array->ndim != ndim || (array->flags & flags) != flags) return 0;
    for (int axis = 0; axis < ndim; axis++)
        if (array->shape[axis] != shape[axis]) return 0;
    return 1;
}

int fits(const Form *form, PyObject *value, int flags) {
    return fits_shape(form->dtype, form->ndim, form->shape, value, flags);
}

/* Return whether a value is a Python number of which NumPy makes an array. */
int is_number(PyObject *value) {
    return Py_TYPE(value) == &PyFloat_Type || Py_TYPE(value) == &PyLong_Type ||
           Py_TYPE(value) == &PyBool_Type;
}

/* -- replacing a public function --------------------------------------------------------------- */

/* Attributes are those of the function: name, documentation, signature. So is `__class__`: then
 * `inspect`, help() and Sphinx treat the object as a Python function. */
PyObject *face_getattr(PyObject *object, PyObject *name) {
    static const char *const own[] = {"remember", "recall", "__reduce__", "__reduce_ex__"};
    PyObject *function = ((Face *)object)->function;
    if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(function);
    for (size_t which = 0; which < sizeof own / sizeof *own; which++)
        if (PyUnicode_CompareWithASCIIString(name, own[which]) == 0)
            return PyObject_GenericGetAttr(object, name);
    return PyObject_GetAttr(function, name);
}

/* Cache an object in a place, and evict the one that was there. */
void remember(Face *face, Remembered **place, Remembered *object) {
    if (*place != NULL) forget(*place);
    *place = object;
    object->face = Py_NewRef((PyObject *)face);
}

/* Remove an object from the cache that has it, if any. */
void forget(Remembered *object) {
    Face *face = (Face *)object->face;
    if (face == NULL) return;
    for (int place = 0; place < REMEMBERED; place++)
        if (face->remembered[place] == object) face->remembered[place] = NULL;
    Py_CLEAR(object->face);
}

/* Call the function; only callers that do not use vectorcall come here. */
PyObject *face_call(PyObject *object, PyObject *arguments, PyObject *keywords) {
    return PyObject_Call(((Face *)object)->function, arguments, keywords);
}

/* Call a function; the arguments after the first `given` are named. */
PyObject *call_function(PyObject *function, PyObject *const *arguments, Py_ssize_t given,
                        PyObject *names) {
    const Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    PyObject *plain = PyTuple_New(given), *keywords = named ? PyDict_New() : NULL, *result = NULL;
    for (Py_ssize_t place = 0; plain != NULL && place < given; place++)
        PyTuple_SetItem(plain, place, Py_NewRef(arguments[place]));
    int done = plain != NULL && (named == 0 || keywords != NULL);
    for (Py_ssize_t place = 0; done && place < named; place++)
        done =
            PyDict_SetItem(keywords, PyTuple_GetItem(names, place), arguments[given + place]) == 0;
    if (done) result = PyObject_Call(function, plain, keywords);
    Py_XDECREF(plain);
    Py_XDECREF(keywords);
    return result;
}

PyObject *face_reduce(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyObject_GetAttrString(((Face *)object)->function, "__qualname__");
}

PyObject *face_repr(PyObject *object) { return PyObject_Repr(((Face *)object)->function); }

/* `pydoc` bypasses `face_getattr` for the docstring. */
static PyObject *face_doc(PyObject *object, void *unused) {
    (void)unused;
    return PyObject_GetAttrString(((Face *)object)->function, "__doc__");
}

PyGetSetDef face_getsets[] = {{"__doc__", face_doc, NULL, NULL, NULL},
                              {NULL, NULL, NULL, NULL, NULL}};
