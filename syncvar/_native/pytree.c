/* Calls with several arrays, which form one vector: the leaves of a pytree, in the order of lists
 * and tuples, and of the sorted keys of dicts.
 *
 * Within a call input, output and result are tuples of arrays. Containers are read at its
 * beginning, and built at its end. */
#include "persistent_call.h"

#include <stdlib.h>

/* Kinds of a TreeDef, which is (kind, sorted keys of a dict, (TreeDef of each part, ...)). They are
 * interned strings. */
static PyObject *of_array, *of_dict, *of_list, *of_tuple;

/* Intern the kinds; -1 with an exception. */
int intern_kinds(void) {
    of_array = PyUnicode_InternFromString("leaf");
    of_dict = PyUnicode_InternFromString("dict");
    of_list = PyUnicode_InternFromString("list");
    of_tuple = PyUnicode_InternFromString("tuple");
    return of_array && of_dict && of_list && of_tuple ? 0 : -1;
}

static int is_leaf(PyObject *structure) { return PyTuple_GetItem(structure, 0) == of_array; }

/* Return the class of a container, NULL for a leaf or an unknown kind. */
PyTypeObject *container_of(PyObject *structure) {
    PyObject *const kind = PyTuple_GetItem(structure, 0);
    return kind == of_dict    ? &PyDict_Type
           : kind == of_list  ? &PyList_Type
           : kind == of_tuple ? &PyTuple_Type
                              : NULL;
}

/* Return the number of leaves of a TreeDef; -1 if it is malformed. */
static Py_ssize_t count_leaves(PyObject *structure) {
    if (!PyTuple_Check(structure) || PyTuple_Size(structure) != 3) return -1;
    if (is_leaf(structure)) return 1;
    PyObject *const names = PyTuple_GetItem(structure, 1), *const parts =
                                                               PyTuple_GetItem(structure, 2);
    PyTypeObject *const kind = container_of(structure);
    if (kind == NULL || !PyTuple_Check(parts) || !PyTuple_Check(names)) return -1;
    if (PyTuple_Size(names) != (kind == &PyDict_Type ? PyTuple_Size(parts) : 0)) return -1;
    Py_ssize_t count = 0;
    for (Py_ssize_t place = 0; place < PyTuple_Size(parts); place++) {
        const Py_ssize_t more = count_leaves(PyTuple_GetItem(parts, place));
        if (more < 0) return -1;
        count += more;
    }
    return count;
}

/* Return the bytes of an element of an array; in a slot halves are float32. */
static Py_ssize_t width_of(const DtypeGroup *group) {
    return group->arithmetic.half ? (Py_ssize_t)sizeof(uint16_t) : group->arithmetic.width;
}

static Py_ssize_t nbytes_of(const NativeCall *self, int place) {
    const Leaf *leaf = &self->leaves[place];
    return leaf->count * width_of(&self->groups[leaf->group]);
}

/* Return the Python type whose numbers become arrays of a dtype, or NULL. */
static PyTypeObject *number_of(PyObject *dtype) {
    enum { BOOL = 0, LONG = 7, DOUBLE = 12 }; /* NumPy's type numbers */
    PyObject *found = PyObject_GetAttrString(dtype, "num");
    const long number = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    return number == BOOL     ? &PyBool_Type
           : number == LONG   ? &PyLong_Type
           : number == DOUBLE ? &PyFloat_Type
                              : NULL;
}

/* Read the dtype groups, ((arithmetic, dtype, start of the vector in a slot, its elements), ...).
 */
static int read_groups(NativeCall *self, PyObject *given) {
    const Py_ssize_t count = PyTuple_Size(given), slot = self->is_long
                                                             ? self->channel->side_bytes
                                                             : in_slots(self, &self->output);
    if (count < 1 || count > DTYPES_MAX) return 0;
    self->first_small = self->is_long;
    self->kept_groups = Py_NewRef(given); /* owns the dtypes and ufuncs */
    for (; self->group_count < count; self->group_count++) {
        DtypeGroup *group = &self->groups[self->group_count];
        Step apply = {0};
        PyObject *arithmetic;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, self->group_count), "OOnn", &arithmetic,
                              &group->dtype, &group->start, &group->count))
            return 0;
        group->number = number_of(group->dtype);
        const int is_read = read_arithmetic(arithmetic, &group->arithmetic, &apply);
        Py_XDECREF(group->arithmetic.fold.owner);
        Py_XDECREF(group->arithmetic.divide.owner);
        Py_XDECREF(apply.owner);
        if (!is_read || apply.loop != NULL) return 0;
        if (self->group_count < self->first_small) continue; /* a program combines it */
        if (group->arithmetic.fold.loop == NULL || group->start % SLOT_ALIGN_BYTES ||
            group->count < 0 || group->count > slot)
            return 0;
        if (!is_within(group->start, group->count * group->arithmetic.width, slot)) return 0;
    }
    return 1;
}

/* Read the leaves, ((shape, is_separate, group), ...); an empty tuple means one array. */
int read_leaves(NativeCall *self, PyObject *groups, PyObject *given) {
    const Py_ssize_t count = PyTuple_Size(given);
    if (count < 1) return count == 0;
    if (count > LEAVES_MAX || count_leaves(self->structure) != count || is_leaf(self->structure) ||
        !read_groups(self, groups))
        return 0;
    self->leaves = new_room(&self->kept_leaves, count * (Py_ssize_t)sizeof *self->leaves);
    self->leaf_arguments = PyTuple_New(count);
    if (self->leaves == NULL || self->leaf_arguments == NULL) return 0;
    Py_ssize_t found[DTYPES_MAX] = {0};
    for (Py_ssize_t place = 0; place < count; place++) {
        Leaf *leaf = &self->leaves[place];
        PyObject *shape;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, place), "Opi", &shape, &leaf->is_separate,
                              &leaf->group))
            return 0;
        if (leaf->group < 0 || leaf->group >= self->group_count) return 0;
        leaf->ndim = (int)read_numbers(shape, leaf->shape, LEAF_NDIM_MAX);
        if (leaf->ndim < 0) return 0;
        leaf->count = 1;
        for (int axis = 0; axis < leaf->ndim; axis++) leaf->count *= leaf->shape[axis];
        self->span_count += leaf->group < self->first_small;
        leaf->first = found[leaf->group];
        found[leaf->group] += leaf->count;
        PyObject *arguments = PyTuple_Pack(2, shape, self->groups[leaf->group].dtype);
        if (arguments == NULL || PyTuple_SetItem(self->leaf_arguments, place, arguments) < 0)
            return 0;
    }
    for (int group = 0; group < self->group_count; group++)
        if (found[group] != self->groups[group].count) return 0;
    if ((self->group_count == 1 || self->is_long) &&
        self->groups[0].count * width_of(&self->groups[0]) != self->output.nbytes)
        return 0;
    if (self->input.nbytes != self->output.nbytes) return 0;
    self->leaf_count = (int)count;
    const DtypeGroup *last = &self->groups[self->group_count - 1];
    if (self->group_count > self->first_small)
        self->room = new_room(&self->kept_room, last->start + last->count * last->arithmetic.width);
    return self->group_count == self->first_small || self->room != NULL;
}

static int fits_leaf(const NativeCall *self, int place, PyObject *value, int flags) {
    const Leaf *leaf = &self->leaves[place];
    return fits_shape(self->groups[leaf->group].dtype, leaf->ndim, leaf->shape, value, flags);
}

static int is_number_of(const NativeCall *self, int place, PyObject *value) {
    const Leaf *leaf = &self->leaves[place];
    return leaf->ndim == 0 && Py_TYPE(value) == self->groups[leaf->group].number;
}

static int is_array(PyObject *value) { return (PyObject *)Py_TYPE(value) == array_type; }

/* Return whether all keys of a dict are plain strings: then a lookup runs no Python code. */
static int has_plain_names(PyObject *dict) {
    PyObject *name;
    Py_ssize_t place = 0;
    while (PyDict_Next(dict, &place, &name, NULL))
        if (!PyUnicode_CheckExact(name)) return 0;
    return 1;
}

/* Append the leaves of a value to `items`; return whether the value has this TreeDef. A list of
 * numbers only is an array itself, not a list of arrays. */
static int take_items(PyObject *structure, PyObject *value, PyObject **items, int *taken) {
    if (is_leaf(structure)) {
        items[(*taken)++] = Py_NewRef(value);
        return 1;
    }
    PyObject *const names = PyTuple_GetItem(structure, 1), *const parts =
                                                               PyTuple_GetItem(structure, 2);
    const Py_ssize_t size = PyTuple_Size(parts);
    const int is_dict = PyDict_CheckExact(value), is_list = PyList_CheckExact(value);
    if (Py_TYPE(value) != container_of(structure) || PyObject_Size(value) != size) return 0;
    if (is_dict && !has_plain_names(value)) return 0;
    int holds = is_dict;
    for (Py_ssize_t place = 0; place < size; place++) {
        PyObject *const structure_of_part = PyTuple_GetItem(parts, place);
        PyObject *part = is_dict   ? PyDict_GetItem(value, PyTuple_GetItem(names, place))
                         : is_list ? PyList_GetItem(value, place)
                                   : PyTuple_GetItem(value, place);
        if (part == NULL) return 0;
        holds = holds || !is_leaf(structure_of_part) || is_array(part);
        if (!take_items(structure_of_part, part, items, taken)) return 0;
    }
    return holds;
}

static void drop_items(PyObject **items, int taken) {
    while (taken > 0) Py_DECREF(items[--taken]);
}

/* Get the leaves of a value, from its containers or a `PyTree`; return how many, 0 if its TreeDef
 * differs. No Python code runs meanwhile. Release them with `drop_items`. */
static int get_items(const NativeCall *self, PyObject *value, PyObject **items) {
    int taken = 0, are_all = 0;
    if ((PyObject *)Py_TYPE(value) == self->leaves_type) {
        PyObject *const arrays = PyTuple_GetItem(value, 1);
        are_all =
            arrays != NULL && PyList_CheckExact(arrays) && PyList_Size(arrays) == self->leaf_count;
        while (are_all && taken < self->leaf_count) {
            items[taken] = Py_NewRef(PyList_GetItem(arrays, taken));
            taken++;
        }
    } else {
        are_all = take_items(self->structure, value, items, &taken);
    }
    if (PyErr_Occurred()) PyErr_Clear(); /* of a failed lookup */
    if (are_all) return taken;
    drop_items(items, taken);
    return 0;
}

/* Return whether the leaves of a value fit this call; numbers become arrays. */
int holds_leaves(const NativeCall *self, PyObject *value) {
    PyObject *items[LEAVES_MAX];
    const int taken = get_items(self, value, items);
    int are_all = taken > 0;
    for (int place = 0; are_all && place < taken; place++)
        are_all = is_array(items[place]) ? fits_leaf(self, place, items[place], 0)
                                         : is_number_of(self, place, items[place]);
    drop_items(items, taken);
    return are_all;
}

/* Return the arrays of a value as a tuple; NULL without an exception if they do not fit. */
PyObject *leaves_of(const NativeCall *self, PyObject *value, int flags) {
    PyObject *items[LEAVES_MAX];
    const int taken = get_items(self, value, items);
    PyObject *made = taken == 0 ? NULL : PyTuple_New(taken);
    for (int place = 0; made != NULL && place < taken; place++) {
        PyObject *array = NULL;
        if (is_array(items[place]))
            array = Py_NewRef(items[place]);
        else if (is_number_of(self, place, items[place]) && !(flags & WRITEABLE))
            array = PyObject_CallFunctionObjArgs(as_array, items[place], NULL);
        if (array == NULL || !fits_leaf(self, place, array, flags)) {
            Py_XDECREF(array);
            Py_CLEAR(made);
        } else {
            PyTuple_SetItem(made, place, array);
        }
    }
    drop_items(items, taken);
    if (made == NULL && PyErr_Occurred()) PyErr_Clear(); /* the slow path raises it again */
    return made;
}

/* Return whether arrays still fit. */
int are_leaves(const NativeCall *self, PyObject *arrays, int flags) {
    int all = 1;
    for (int place = 0; place < self->leaf_count; place++)
        all = all && fits_leaf(self, place, PyTuple_GetItem(arrays, place), flags);
    return all;
}

/* Make the arrays of a result; NULL with an exception. */
PyObject *make_leaves(const NativeCall *self) {
    PyObject *made = PyTuple_New(self->leaf_count);
    for (int place = 0; made != NULL && place < self->leaf_count; place++) {
        PyObject *array =
            PyObject_Call(make_array, PyTuple_GetItem(self->leaf_arguments, place), NULL);
        if (array == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SetItem(made, place, array);
    }
    return made;
}

/* Build containers of arrays from `*place` on, and advance it; NULL with an exception. */
static PyObject *contain(PyObject *structure, PyObject *arrays, Py_ssize_t *place) {
    if (is_leaf(structure)) {
        PyObject *array = PyTuple_GetItem(arrays, (*place)++);
        return array == NULL ? NULL : Py_NewRef(array);
    }
    PyObject *const names = PyTuple_GetItem(structure, 1), *const parts =
                                                               PyTuple_GetItem(structure, 2);
    const Py_ssize_t size = PyTuple_Size(parts);
    PyTypeObject *const kind = container_of(structure);
    const int is_dict = kind == &PyDict_Type, is_list = kind == &PyList_Type;
    PyObject *made = is_dict ? PyDict_New() : is_list ? PyList_New(size) : PyTuple_New(size);
    for (Py_ssize_t number = 0; made != NULL && number < size; number++) {
        PyObject *part = contain(PyTuple_GetItem(parts, number), arrays, place);
        if (part == NULL) {
            Py_CLEAR(made);
        } else if (is_dict) {
            if (PyDict_SetItem(made, PyTuple_GetItem(names, number), part) < 0) Py_CLEAR(made);
            Py_DECREF(part);
        } else if (is_list) {
            PyList_SetItem(made, number, part);
        } else {
            PyTuple_SetItem(made, number, part);
        }
    }
    return made;
}

/* Return the pytree of the result; NULL with an exception. */
PyObject *structure_of(const NativeCall *self, PyObject *arrays) {
    Py_ssize_t place = 0;
    return contain(self->structure, arrays, &place);
}

/* Get the memory of the arrays of a long vector. */
void find_spans(const NativeCall *self, PyObject *arrays, Span *spans) {
    for (int place = 0; place < self->leaf_count; place++)
        if (self->leaves[place].group < self->first_small)
            *spans++ =
                (Span){((Array *)PyTuple_GetItem(arrays, place))->data, nbytes_of(self, place)};
}

/* A range of memory that is read or written. */
typedef struct {
    const char *start, *stop;
    int is_written;
} Touched;

static int by_start(const void *one, const void *other) {
    const char *const first = ((const Touched *)one)->start, *const second =
                                                                 ((const Touched *)other)->start;
    return (first > second) - (first < second);
}

/* Return whether outputs may be written while inputs are still to be read: each input is its own
 * output or overlaps none, and outputs do not overlap each other. */
int leaves_do_not_overlap(const NativeCall *self, PyObject *input, PyObject *made) {
    Touched *const touched = PyMem_Malloc(2 * (size_t)self->leaf_count * sizeof *touched);
    if (touched == NULL) return 0; /* the slow path tries again */
    size_t count = 0;
    for (int place = 0; place < self->leaf_count; place++) {
        const char *const read = ((Array *)PyTuple_GetItem(input, place))->data,
                          *const written = ((Array *)PyTuple_GetItem(made, place))->data;
        const Py_ssize_t nbytes = nbytes_of(self, place);
        if (nbytes == 0) continue;
        touched[count++] = (Touched){written, written + nbytes, 1};
        if (read != written) touched[count++] = (Touched){read, read + nbytes, 0};
    }
    qsort(touched, count, sizeof *touched, by_start);
    const char *stop = NULL, *stop_of_written = NULL; /* of the ranges that begin before */
    int apart = 1;
    for (size_t number = 0; apart && number < count; number++) {
        const Touched *one = &touched[number];
        const char *const before = one->is_written ? stop : stop_of_written;
        apart = before == NULL || before <= one->start;
        if (stop == NULL || one->stop > stop) stop = one->stop;
        if (one->is_written && (stop_of_written == NULL || one->stop > stop_of_written))
            stop_of_written = one->stop;
    }
    PyMem_Free(touched);
    return apart;
}

/* Return whether an array that may be reduced by itself is in shared memory. */
int lies_alone(const NativeCall *self, const Span *spans) {
    const ChannelState *channel = self->channel;
    const char *start = channel->memory.buf;
    int any = 0;
    for (int place = 0; place < self->leaf_count; place++) {
        if (self->leaves[place].group >= self->first_small) continue;
        any = any || (self->leaves[place].is_separate && spans->at >= start &&
                      spans->at < start + channel->memory.len);
        spans++;
    }
    return any;
}

/* Copy arrays into a slot, grouped by dtype, except those of a long vector. It needs no GIL,
 * because it only reads tuples. */
void put_leaves(const NativeCall *self, char *slot, PyObject *arrays) {
    for (int place = 0; place < self->leaf_count; place++) {
        const Leaf *leaf = &self->leaves[place];
        const DtypeGroup *group = &self->groups[leaf->group];
        if (leaf->group < self->first_small) continue;
        const char *source = ((Array *)PyTuple_GetItem(arrays, place))->data;
        char *const target = slot + group->start + leaf->first * group->arithmetic.width;
        if (group->arithmetic.half)
            widen(group->arithmetic.half, source, (float *)target, leaf->count);
        else
            copy_out(&self->channel->stores, target, source, (size_t)nbytes_of(self, place));
    }
}

/* Combine the slots of all ranks, in rank order, and store the results. */
void combine_leaves(const NativeCall *self, const char *const *slots, PyObject *arrays) {
    const char *terms[RANKS_MAX];
    for (int number = self->first_small; number < self->group_count; number++) {
        const DtypeGroup *group = &self->groups[number];
        for (int rank = 0; rank < self->channel->size; rank++)
            terms[rank] = slots[rank] + group->start;
        fold_terms(&group->arithmetic, NULL, terms, self->channel->size, self->room + group->start,
                   group->count);
    }
    for (int place = 0; place < self->leaf_count; place++) {
        const Leaf *leaf = &self->leaves[place];
        const DtypeGroup *group = &self->groups[leaf->group];
        if (leaf->group < self->first_small) continue;
        memcpy(((Array *)PyTuple_GetItem(arrays, place))->data,
               self->room + group->start + leaf->first * width_of(group),
               (size_t)nbytes_of(self, place));
    }
}
