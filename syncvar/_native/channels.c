/* Waiting for the other ranks of a group, and the state of a channel that C and Python share. */
#include "native.h"

static PyMemberDef channel_state_members[] = {
    NUMBER(ChannelState, side), NUMBER(ChannelState, last),     NUMBER(ChannelState, phase),
    NUMBER(ChannelState, tail), FLAG(ChannelState, is_settled), {NULL},
};

/* -- waiting ----------------------------------------------------------------------------------- */

/* Record whether a spin has succeeded before the rank yielded its core. */
void note_looks(Wait *wait, int has_come) {
    Patience *patience = wait->patience;
    if (wait->most > LOOKS_SHORT)
        patience->missed = has_come ? 0 : patience->missed + (patience->missed < MISSED_MOST);
}

/* Yield the core to others; return whether to poll again. */
int give_way(Wait *wait) {
    if (wait->until == 0) note_looks(wait, 0);
    if (seen(wait->abort)) return 0;
    const int64_t now = now_ns();
    if (wait->until == 0) wait->until = now + wait->patience_ns;
    if (now >= wait->until) return 0;
    wait->looks = wait->most - LOOKS_SHORT;
    if (wait->patience_ns > YIELD_NS || wait->patience->shares_cores) sched_yield();
    return 1;
}

/* Return whether a rank has published a need: a word, or minus a phase of the last call. */
static inline int is_at(const ChannelState *channel, Py_ssize_t other, long long need) {
    if (need > 0) return seen(channel->words + other) >= (uint64_t)need;
    return seen(channel->words + other + channel->phase_at) >= (uint64_t)-need ||
           (seen(channel->words + other) >= (uint64_t)channel->last + 2 &&
            seen(channel->words + other + channel->done_at) >= (uint64_t)-need);
}

/* Spin until all others have published `need`; with a negative patience poll once. Return whether
 * they have. */
int wait_for_others(ChannelState *channel, long long need, int64_t patience_ns) {
    Wait wait = wait_with(&channel->patience, channel->words + channel->abort_at, patience_ns);
    for (int other = 0; other < channel->size - 1; other++)
        while (!is_at(channel, channel->others[other], need))
            if (patience_ns < 0 || !may_look_again(&wait)) return 0;
    note_success(&wait);
    return 1;
}

/* bind(memory, entry, fields, others, slots, sizes, rank, shares_cores, looks, processes): set the
 * offsets of all ranks' words and slots. `processes` are readable processes, one a rank, or none.
 */
static PyObject *channel_state_bind(PyObject *object, PyObject *arguments) {
    ChannelState *self = (ChannelState *)object;
    PyObject *memory, *fields, *others, *slots, *sizes, *processes;
    Py_ssize_t places[7], lengths[3];
    if (self->is_bound) {
        PyErr_SetString(PyExc_ValueError, "this channel is bound already");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "OnOOOOiiiO", &memory, &self->entry, &fields, &others, &slots,
                          &sizes, &self->rank, &self->patience.shares_cores, &self->patience.looks,
                          &processes) ||
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
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError,
                            "processes must name one process for each rank, or none");
        return NULL;
    }
    int good = self->size >= 2 && self->rank >= 0 && self->rank < self->size &&
               read_numbers(others, self->others, RANKS_MAX) == self->size - 1;
    if (!good || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a channel must have 2 to 64 ranks");
        return NULL;
    }
    const Py_ssize_t entry_bytes = 8 * 16, segment_bytes = self->memory.len;
    good = is_within(8 * self->entry, entry_bytes, segment_bytes) &&
           is_within(8 * self->abort_at, 8, segment_bytes);
    for (int field = 0; field < 5; field++)
        good = good && is_within(8 * places[field], 16, entry_bytes);
    good = good && is_within(8 * self->segments_at, 8, entry_bytes);
    for (int other = 0; other < self->size - 1; other++)
        good = good && is_within(8 * self->others[other], entry_bytes, segment_bytes);
    for (int rank = 0; rank < self->size; rank++)
        good = good && is_within(self->slots[rank], 2 * self->side_bytes, segment_bytes);
    if (!good) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "a channel would use memory outside the shared memory");
        return NULL;
    }
    self->words = self->memory.buf;
    self->is_bound = 1;
    Py_RETURN_NONE;
}

static void channel_state_dealloc(PyObject *object) {
    ChannelState *self = (ChannelState *)object;
    if (self->is_bound) PyBuffer_Release(&self->memory);
    dealloc_object(object);
}

static PyMethodDef channel_state_methods[] = {
    {"bind", channel_state_bind, METH_VARARGS, "Set the offsets of all ranks' words and slots."},
    {NULL},
};

TYPE(ChannelState, channel_state, channel_state_members, Py_TPFLAGS_BASETYPE,
     "The last publication of a rank in a group, and whether all ranks have reached it.",
     {Py_tp_methods, channel_state_methods}, {Py_tp_dealloc, channel_state_dealloc})
