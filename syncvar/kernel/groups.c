/* Several variables that are written together: what is looked at and brought together for each of them. See
 * syncvar/variables/side_by_side.py, which does the same in Python.
 */
#include "native.h"

/* A variable: where its value is brought to, and what its storage held when the copies were laid side by side. */
typedef struct {
    Py_ssize_t nbytes;
    Laid laid;
} Member;

typedef struct {
    PyObject_HEAD PyObject *variables, *storages, *tallies, *parts, *array_type;
    Member *members;
    Py_ssize_t count;
    PyObject *kept_members;
} Group;

static Copied *storage_of(const Group *self, Py_ssize_t place) { return (Copied *)PyTuple_GetItem(self->storages, place); }

/* Bring the values of a list of (variable, value) together; False where one of the pairs is unusual. */
static PyObject *group_load(PyObject *object, PyObject *pairs) {
    Group *self = (Group *)object;
    const int flags = IN_ONE_PIECE | ALIGNED;
    int good = PyList_CheckExact(pairs) && PyList_Size(pairs) == self->count;
    for (Py_ssize_t place = 0; good && place < self->count; place++) {
        PyObject *pair = PyList_GetItem(pairs, place), *part = PyTuple_GetItem(self->parts, place);
        good = PyTuple_CheckExact(pair) && PyTuple_Size(pair) == 2 &&
               PyWeakref_GetObject(PyTuple_GetItem(self->variables, place)) == PyTuple_GetItem(pair, 0) &&
               (PyObject *)Py_TYPE(PyTuple_GetItem(pair, 1)) == self->array_type;
        if (!good) break;
        const Array *from = (const Array *)PyTuple_GetItem(pair, 1), *to = (const Array *)part;
        good = from->dtype == to->dtype && from->ndim == to->ndim && (from->flags & flags) == flags &&
               memcmp(from->shape, to->shape, to->ndim * sizeof(intptr_t)) == 0;
        if (good) memcpy(to->data, from->data, self->members[place].nbytes);
    }
    PyErr_Clear();
    return PyBool_FromLong(good);
}

/* Take note that the copies lie side by side now. */
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
    for (Py_ssize_t place = 0; place < self->count; place++) storage_of(self, place)->is_being_written = is_being_written;
}

/* Mark the copies as being written; False, and no mark, where they do not lie side by side or a view of one is alive. */
static PyObject *group_begin(PyObject *object, PyObject *unused) {
    (void)unused;
    const Group *self = (const Group *)object;
    mark(self, 1);
    int good = 1;
    for (Py_ssize_t place = 0; good && place < self->count; place++) {
        const Laid *laid = &self->members[place].laid;
        good = laid->moves == storage_of(self, place)->moves && !is_exposed(laid);
    }
    if (!good) mark(self, 0);
    return PyBool_FromLong(good);
}

/* Take the marks off, and count what has been done. */
static PyObject *group_end(PyObject *object, PyObject *is_done) {
    const Group *self = (const Group *)object;
    mark(self, 0);
    for (Py_ssize_t place = 0; is_done == Py_True && place < self->count; place++) {
        Tally *tally = (Tally *)PyTuple_GetItem(self->tallies, place);
        tally->writes++;
        tally->collectives++;
    }
    Py_RETURN_NONE;
}

/* Group(nbytes, *, what it holds): tuples of one length; the variables are weak references. */
static PyObject *group_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *nbytes;
    if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &nbytes)) return NULL;
    Group *self = new_holding(type, keywords);
    if (self == NULL) return NULL;
    const Py_ssize_t count = PyTuple_Size(nbytes);
    PyObject *const tuples[] = {self->variables, self->storages, self->tallies, self->parts};
    int good = 1;
    for (int tuple = 0; tuple < 4; tuple++) good = good && PyTuple_Check(tuples[tuple]) && PyTuple_Size(tuples[tuple]) == count;
    for (Py_ssize_t place = 0; good && place < count; place++)
        good = PyObject_TypeCheck(PyTuple_GetItem(self->storages, place), copied_type) &&
               PyObject_TypeCheck(PyTuple_GetItem(self->tallies, place), tally_type) &&
               (PyObject *)Py_TYPE(PyTuple_GetItem(self->parts, place)) == self->array_type;
    if (!good) {
        PyErr_SetString(PyExc_TypeError, "a group is made of as many references, storages, tallies, arrays and numbers");
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
    HELD(Group, variables), HELD(Group, storages), HELD(Group, tallies), HELD(Group, parts), HELD(Group, array_type),
    HOLDS(Group, kept_members, "_members"), {NULL},
};

static PyMethodDef group_methods[] = {
    {"load", group_load, METH_O, "Bring the values of (variable, value) pairs together; False where one is unusual."},
    {"lay", group_lay, METH_NOARGS, "Take note that the copies lie side by side."},
    {"begin", group_begin, METH_NOARGS, "Mark the copies as being written; False where that cannot be done in place."},
    {"end", group_end, METH_O, "Take the marks off, and count what has been done."},
    {NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, group_new},
    {Py_tp_methods, group_methods},
    {Py_tp_members, group_members},
    HOLDING,
    {Py_tp_doc, "Variables that are written together."},
    {0, NULL},
};

PyType_Spec group_spec = TYPE_OF(Group, Py_TPFLAGS_HAVE_GC, group_slots);
