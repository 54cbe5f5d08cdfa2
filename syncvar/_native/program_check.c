/* Checks of programs: every read and write is within the memories of the program. */
#include "native.h"

#define MEMORIES_MAX (1 << 16)

static int is_known(const Program *self, int64_t memory, int64_t start, int64_t count) {
    if (memory < 0 || memory >= self->memories) return 0;
    const int64_t size = self->named[memory].nbytes / self->arithmetic.width;
    return start >= 0 && count >= 0 && count <= size && start <= size - count;
}

/* Return whether all instructions are complete, and stay within their memories. */
static int is_sound(const Program *self) {
    Py_ssize_t place = 0;
    /* The steps must begin at an instruction, after nothing but copies. */
    int begins = self->opening == 0;
    while (place < self->length) {
        const int64_t *step = self->code + place;
        const Py_ssize_t left = self->length - place;
        if (place == self->opening) begins = 1;
        if (!begins && *step != COPY) return 0;
        if (*step == COPY || *step == STORE) {
            if (left < 6 || !is_known(self, step[1], step[2], step[5]) ||
                !is_known(self, step[3], step[4], step[5]))
                return 0;
            if (self->named[step[3]].kind == PEER_SOURCE) return 0; /* read-only */
            place += 6;
        } else if (*step == COMBINE) {
            if (left < 5 || step[4] < 1 || step[4] > RANKS_MAX || left < 5 + 2 * step[4] ||
                self->arithmetic.fold.loop == NULL)
                return 0;
            if (!is_known(self, step[1], step[2], step[3]) ||
                self->named[step[1]].kind == PEER_SOURCE)
                return 0;
            for (int64_t term = 0; term < step[4]; term++)
                if (!is_known(self, step[5 + 2 * term], step[6 + 2 * term], step[3])) return 0;
            place += 5 + 2 * step[4];
        } else if (*step == PUBLISH) {
            place += 1;
        } else if (*step == AWAIT && left >= 2 && step[1] >= 0) {
            place += 2;
        } else {
            return 0;
        }
    }
    return begins || self->opening == self->length;
}

/* Program(code, opening, names, sizes, arithmetic): the code as 64-bit numbers; how many of them
 * come before phase 0; kind, rank and place of each memory; and the elements of each memory. */
static PyObject *program_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    Py_ssize_t opening, *numbers = NULL;
    PyObject *code, *named, *given, *arithmetic;
    if (keywords != NULL ||
        !PyArg_ParseTuple(arguments, "SnOOO", &code, &opening, &named, &given, &arithmetic))
        return NULL;
    Program *self = new_object(type);
    if (self == NULL) return NULL;
    self->opening = opening;
    self->length = PyBytes_Size(code) / 8;
    self->code = (const int64_t *)PyBytes_AsString(Py_NewRef(code));
    self->kept_code = code;
    const Py_ssize_t memories = PyTuple_Size(given);
    if (memories < 0 || memories > MEMORIES_MAX ||
        !read_arithmetic(arithmetic, &self->arithmetic, &self->apply))
        goto wrong;
    if (self->arithmetic.half && self->apply.loop != NULL) goto wrong;
    const Py_ssize_t width = self->arithmetic.width;
    numbers = PyMem_Malloc((4 * memories + 1) * sizeof *numbers);
    self->named = new_room(&self->kept_named, memories * sizeof *self->named);
    if (numbers == NULL || self->named == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    Py_ssize_t *const names = numbers + memories;
    if (read_numbers(given, numbers, memories) < 0 ||
        read_numbers(named, names, 3 * memories) != 3 * memories)
        goto wrong;
    self->memories = (int)memories;
    for (int memory = 0; memory < memories; memory++) {
        if (numbers[memory] < 0 || numbers[memory] > PY_SSIZE_T_MAX / width) goto wrong;
        self->named[memory] = (Named){numbers[memory] * width, (int)names[3 * memory],
                                      (int)names[3 * memory + 1], (int)names[3 * memory + 2]};
        if (self->named[memory].kind == SCRATCH && self->named[memory].nbytes > self->scratch_bytes)
            self->scratch_bytes = self->named[memory].nbytes;
    }
    if (!is_sound(self)) goto wrong;
    PyMem_Free(numbers);
    return (PyObject *)self;
wrong:
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the C extension cannot run this program");
failed:
    PyMem_Free(numbers);
    Py_DECREF(self);
    return NULL;
}

static PyMemberDef program_members[] = {
    HOLDS(Program, arithmetic.fold.owner, "_fold"),
    HOLDS(Program, arithmetic.divide.owner, "_divide"),
    HOLDS(Program, apply.owner, "_apply"),
    HOLDS(Program, kept_code, "_code"),
    HOLDS(Program, kept_named, "_named"),
    {NULL},
};

TYPE(Program, program, program_members, Py_TPFLAGS_HAVE_GC,
     "A checked program: its instructions stay within their memories.", {Py_tp_new, program_new},
     HOLDING)
