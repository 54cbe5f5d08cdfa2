/* Calls that take several arrays as one vector: those of a list or a tuple in its order, of a dict in the order of its sorted names.
 *
 * Within a call what is brought, where the result goes and the result are tuples of arrays; their structure is looked at and made at
 * its beginning and end. */
#include "calls.h"

/* Learn which arrays they are, from ((shape, whether it is reduced alone where it lies in the arena), ...); nothing of one array. */
int read_leaves(SlotCall *self, PyObject *given) {
    const Py_ssize_t count = PyTuple_Size(given);
    if (count < 1) return count == 0;
    if (count > LEAVES_MAX || self->names == Py_None) return 0;
    if (PyTuple_Check(self->names) && PyTuple_Size(self->names) != count) return 0;
    self->leaves = new_room(&self->kept_leaves, count * (Py_ssize_t)sizeof *self->leaves);
    self->leaf_arguments = PyTuple_New(count);
    if (self->leaves == NULL || self->leaf_arguments == NULL) return 0;
    Py_ssize_t start = 0;
    for (Py_ssize_t place = 0; place < count; place++) {
        Leaf *leaf = &self->leaves[place];
        PyObject *shape;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, place), "Op", &shape, &leaf->is_alone)) return 0;
        leaf->ndim = (int)read_numbers(shape, leaf->shape, LEAF_NDIM_MAX);
        if (leaf->ndim < 0) return 0;
        leaf->count = 1;
        for (int axis = 0; axis < leaf->ndim; axis++) leaf->count *= leaf->shape[axis];
        start += leaf->count;
        PyObject *arguments = PyTuple_Pack(2, shape, self->made.dtype);
        if (arguments == NULL || PyTuple_SetItem(self->leaf_arguments, place, arguments) < 0) return 0;
    }
    self->leaf_count = (int)count;
    self->leaf_width = start ? self->made.nbytes / start : 1;
    if (start * self->leaf_width != self->made.nbytes || self->brought.nbytes != self->made.nbytes) return 0;
    self->room = self->is_long ? NULL : new_room(&self->kept_room, self->made.nbytes);
    return self->is_long || self->room != NULL;
}

static int fits_leaf(const SlotCall *self, int place, PyObject *value, int flags) {
    const Leaf *leaf = &self->leaves[place];
    return fits_shape(self->made.dtype, leaf->ndim, leaf->shape, value, flags);
}

/* Return what holds the arrays of a value, borrowed: itself, or the list of a `Leaves`; NULL where it is none of such as these. */
static PyObject *holder_of(const SlotCall *self, PyObject *value) {
    PyObject *kind = (PyObject *)Py_TYPE(value);
    if (kind == (PyObject *)&PyDict_Type) return PyTuple_Check(self->names) && PyDict_Size(value) == self->leaf_count ? value : NULL;
    if (kind == (PyObject *)&PyList_Type) return self->names == kind && PyList_Size(value) == self->leaf_count ? value : NULL;
    if (kind == (PyObject *)&PyTuple_Type) return self->names == kind && PyTuple_Size(value) == self->leaf_count ? value : NULL;
    PyObject *arrays = peek(value, name_arrays);
    if (arrays == NULL) PyErr_Clear();
    return arrays != NULL && PyList_CheckExact(arrays) && PyList_Size(arrays) == self->leaf_count ? arrays : NULL;
}

static PyObject *item_of(const SlotCall *self, PyObject *holder, int place) {
    if (PyList_CheckExact(holder)) return PyList_GetItem(holder, place);
    return PyTuple_CheckExact(holder) ? PyTuple_GetItem(holder, place) : PyDict_GetItem(holder, PyTuple_GetItem(self->names, place));
}

/* Return whether a value may be such arrays, numbers among them: NumPy makes arrays of these. A list of numbers alone is one array. */
int holds_leaves(const SlotCall *self, PyObject *value) {
    PyObject *holder = holder_of(self, value);
    int arrays = holder != NULL && PyDict_CheckExact(holder);
    for (int place = 0; holder != NULL && place < self->leaf_count; place++) {
        PyObject *item = item_of(self, holder, place);
        if (item == NULL) return 0;
        const int is_array = fits_leaf(self, place, item, 0);
        if (!is_array && (self->leaves[place].ndim != 0 || !is_number(item))) return 0;
        arrays += is_array;
    }
    return arrays > 0;
}

/* Return the arrays of a value as a tuple; NULL without an error where they are not such as these. */
PyObject *leaves_of(const SlotCall *self, PyObject *value, int flags) {
    PyObject *holder = holder_of(self, value), *made = holder == NULL ? NULL : PyTuple_New(self->leaf_count);
    for (int place = 0; made != NULL && place < self->leaf_count; place++) {
        PyObject *item = item_of(self, holder, place), *array = NULL;
        if (item != NULL && (PyObject *)Py_TYPE(item) == array_type)
            array = Py_NewRef(item);
        else if (item != NULL && is_number(item) && !(flags & WRITEABLE))
            array = PyObject_CallFunctionObjArgs(as_array, item, NULL);
        if (array == NULL || !fits_leaf(self, place, array, flags)) {
            Py_XDECREF(array);
            Py_CLEAR(made);
        } else {
            PyTuple_SetItem(made, place, array);
        }
    }
    if (made == NULL && PyErr_Occurred()) PyErr_Clear(); /* the general way raises it again */
    return made;
}

/* Return whether arrays are still such as these. */
int are_leaves(const SlotCall *self, PyObject *arrays, int flags) {
    int all = 1;
    for (int place = 0; place < self->leaf_count; place++) all = all && fits_leaf(self, place, PyTuple_GetItem(arrays, place), flags);
    return all;
}

/* Make the arrays of a result; NULL with an error. */
PyObject *make_leaves(const SlotCall *self) {
    PyObject *made = PyTuple_New(self->leaf_count);
    for (int place = 0; made != NULL && place < self->leaf_count; place++) {
        PyObject *array = PyObject_Call(make_array, PyTuple_GetItem(self->leaf_arguments, place), NULL);
        if (array == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SetItem(made, place, array);
    }
    return made;
}

/* Return the structure of arrays that the caller gets; NULL with an error. */
PyObject *structure_of(const SlotCall *self, PyObject *arrays) {
    const int is_dict = PyTuple_Check(self->names);
    if (self->names == (PyObject *)&PyTuple_Type) return Py_NewRef(arrays);
    PyObject *made = is_dict ? PyDict_New() : PyList_New(self->leaf_count);
    for (int place = 0; made != NULL && place < self->leaf_count; place++) {
        PyObject *array = PyTuple_GetItem(arrays, place);
        if (!is_dict)
            PyList_SetItem(made, place, Py_NewRef(array));
        else if (PyDict_SetItem(made, PyTuple_GetItem(self->names, place), array) < 0)
            Py_CLEAR(made);
    }
    return made;
}

/* Find where arrays lie. */
void find_spans(const SlotCall *self, PyObject *arrays, Span *spans) {
    for (int place = 0; place < self->leaf_count; place++)
        spans[place] = (Span){((Array *)PyTuple_GetItem(arrays, place))->data, self->leaves[place].count * self->leaf_width};
}

/* Return whether results may be written while arrays are still to be read: each is its own result, or lies apart from all of them. */
int lie_leaves_apart(const SlotCall *self, PyObject *brought, PyObject *made) {
    Span from[LEAVES_MAX], to[LEAVES_MAX];
    find_spans(self, brought, from);
    find_spans(self, made, to);
    for (int one = 0; one < self->leaf_count; one++)
        for (int other = 0; other < self->leaf_count; other++) {
            const Span *read = &from[other], *written = &to[one], *beside = &to[other];
            const int is_own = one == other && read->at == written->at;
            if (!is_own && read->at < written->at + written->nbytes && written->at < read->at + read->nbytes) return 0;
            if (one < other && beside->at < written->at + written->nbytes && written->at < beside->at + beside->nbytes) return 0;
        }
    return 1;
}

/* Return whether one of those that are reduced alone lies in the arena. */
int lies_alone(const SlotCall *self, const Span *spans) {
    const ChannelState *channel = self->channel;
    const char *start = channel->memory.buf;
    int any = 0;
    for (int place = 0; place < self->leaf_count; place++)
        any = any || (self->leaves[place].is_alone && spans[place].at >= start && spans[place].at < start + channel->memory.len);
    return any;
}

/* Put arrays into a slot, one after the other. */
void put_leaves(const SlotCall *self, char *slot, PyObject *arrays) {
    for (int place = 0; place < self->leaf_count; place++) {
        const Py_ssize_t count = self->leaves[place].count, nbytes = count * self->leaf_width;
        const char *source = ((Array *)PyTuple_GetItem(arrays, place))->data;
        if (self->how.half)
            widen(self->how.half, source, (float *)slot, count);
        else
            copy_out(&self->channel->stores, slot, source, (size_t)nbytes);
        slot += self->how.half ? count * (Py_ssize_t)sizeof(float) : nbytes;
    }
}

/* Store what has been made of them. */
void store_leaves(const SlotCall *self, PyObject *arrays) {
    const char *from = self->room;
    for (int place = 0; place < self->leaf_count; place++) {
        const Py_ssize_t nbytes = self->leaves[place].count * self->leaf_width;
        memcpy(((Array *)PyTuple_GetItem(arrays, place))->data, from, (size_t)nbytes);
        from += nbytes;
    }
}
