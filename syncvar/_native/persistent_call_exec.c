/* Runs persistent calls in shared memory: write, publish, wait, compare, combine.
 *
 * It does the same as `PersistentCall` of syncvar/runtime/persistent_call.py, for contiguous
 * arrays. It leaves every other call to that object before it has changed anything.
 *
 * Small calls keep the GIL, because they take about a microsecond. If the others do not come during
 * a short spin, the call spins on without the GIL. After a millisecond the engine continues it.
 */
#include "persistent_call.h"

/* -- data of a call ---------------------------------------------------------------------------- */

/* One attempt to make a call. */
typedef struct {
    PyObject *x, *out, *spec, *timeout;
    PyObject *input, *target;                 /* the arrays of x and of out, or tuples of several */
    PyObject *info, *output, *number, *began; /* CallInfo, output, call number, start time */
    Span one[2], *spans;                      /* memory of the inputs, then of the outputs */
    PyObject *kept_spans;
    Run *run;     /* run of a long vector */
    int has_lock; /* it has the lock of the group's calls */
    uint64_t fingerprint,
        source; /* published: the call, and the location of the cells or the input */
} Attempt;

/* State of an attempt. */
typedef enum {
    READY,         /* set up; nothing is published yet */
    COMPLETED,     /* the result is there */
    FALL_BACK,     /* nothing has changed: Python has to make the call */
    PUBLISHED,     /* phase 0 is published: the engine has to continue */
    RUN_SUSPENDED, /* the run has to wait: the engine has to continue it */
    FAILED,        /* an exception is set */
} AttemptState;

static char *data_of(PyObject *array) { return ((Array *)array)->data; }

/* Return whether the output may be written while parts of the input are still to be read. */
static int do_not_overlap(const NativeCall *self, PyObject *x, PyObject *out) {
    if (self->leaf_count) return !self->is_long || leaves_do_not_overlap(self, x, out);
    const char *input = ((Array *)x)->data, *output = ((Array *)out)->data;
    if (self->is_long && !self->moves_blocks && input == output) return 1;
    return input + self->input.nbytes <= output || output + self->output.nbytes <= input ||
           (x == out && self->term_count == 0 && !self->parts) || are_all_put(self);
}

/* Return the slot that a rank has published on a side. */
static const char *slot_of(const NativeCall *self, int rank, int side) {
    const ChannelState *channel = self->channel;
    const char *memory = channel->memory.buf;
    if (self->ring >= 0) {
        const uint64_t location =
            seen(channel->words + entry_of(channel, rank) + channel->target_at + side);
        if (location && location <= (uint64_t)channel->memory.len &&
            is_within((Py_ssize_t)location, in_slots(self, &self->output), channel->memory.len))
            return memory + location;
    }
    return memory + channel->slots[rank] + side * channel->side_bytes;
}

static const char *place_in(const NativeCall *self, const Copy *copy, int side, const char *input) {
    return (copy->rank < 0 ? input : slot_of(self, copy->rank, side)) + copy->from;
}

/* Return whether the input may be read instead of this rank's slot: it has the same bytes, and the
 * output does not overwrite bytes that are still to be read. */
static int reads_input(const NativeCall *self, const char *input, const char *out) {
    const Py_ssize_t nbytes = self->output.nbytes;
    return self->ring >= 0 && !self->arithmetic.half && input != NULL &&
           (input == out || input + nbytes <= out || out + nbytes <= input);
}

/* Combine the terms into the result, or apply the combination to it. */
static void combine_terms(const NativeCall *self, int side, const char *input, char *out) {
    const char *terms[RANKS_MAX];
    for (int term = 0; term < self->term_count; term++)
        terms[term] = self->terms[term].rank == self->channel->rank && reads_input(self, input, out)
                          ? input
                          : place_in(self, &self->terms[term], side, input);
    fold_terms(&self->arithmetic, &self->apply, terms, self->term_count, out,
               in_slots(self, &self->output) / self->arithmetic.width);
}

/* Make the result of a call on which all ranks agree. */
void finish(const NativeCall *self, int side, const char *input, PyObject *output) {
    if (self->leaf_count) {
        const char *slots[RANKS_MAX];
        for (int rank = 0; rank < self->channel->size; rank++)
            slots[rank] = slot_of(self, rank, side);
        combine_leaves(self, slots, output);
        return;
    }
    char *const out = data_of(output);
    for (int take = 0; take < self->take_count; take++)
        memmove(out + self->takes[take].to, place_in(self, &self->takes[take], side, input),
                self->takes[take].nbytes);
    if (self->term_count) combine_terms(self, side, input, out);
}

/* -- publishing -------------------------------------------------------------------------------- */

/* End the open asynchronous call of the channel, if that takes a short time only. Return whether a
 * call may begin now: the engine admits calls, nothing is queued, and no other thread is in a call
 * of the group. */
int may_begin(const NativeCall *self) {
    if (self->channel->open_call != NULL &&
        end_async_call(self->channel->open_call, SPIN_SHORT) < 0)
        PyErr_Clear();
    return self->channel->is_settled && PyObject_Size(self->queue) == 0 &&
           is_free(self->engine, self->busy);
}

/* Take the number of the next call; -1 with an exception. */
long long take_number(const NativeCall *self, PyObject **number) {
    *number = PyLong_FromLongLong(self->communicator->next_call);
    return *number == NULL ? -1 : self->communicator->next_call++;
}

/* Publish phase 0 of a call on the current side. */
void publish_call(const NativeCall *self, long long call, uint64_t check, uint64_t source,
                  uint64_t target) {
    ChannelState *channel = self->channel;
    const int side = (int)channel->side;
    uint64_t *entry = channel->words + channel->entry;
    if (self->moves_blocks ||
        self->is_long) /* if only details differ, the others need the plain check */
        store(entry + channel->source_at + side, source);
    channel->last = (call << 1) + 2;
    if (channel->phase || entry[channel->done_at]) {
        store(entry + channel->done_at, (uint64_t)channel->phase);
        channel->phase = 0;
        store(entry + channel->phase_at, 0);
    }
    if (self->moves_blocks || self->ring >= 0 || self->is_long)
        store(entry + channel->target_at + side, target);
    store(entry + channel->check_at + side, check);
    store(entry, (uint64_t)channel->last | (uint64_t)side);
}

/* Wait for phase 0 of the others; return whether they have published the same check. Ranks without
 * abandoned calls use the same side. */
int all_agree(const NativeCall *self, uint64_t check, int64_t patience_ns) {
    ChannelState *channel = self->channel;
    int agree = wait_for_others(channel, channel->last, patience_ns);
    for (int other = 0; agree && other < channel->size - 1; other++)
        agree = seen(channel->words + channel->others[other] + channel->check_at +
                     (int)channel->side) == check;
    return agree;
}

/* Copy the input into this rank's slot; return its offset if it is in the ring of slots, else 0. */
uint64_t put_own(const NativeCall *self, int side, PyObject *input) {
    ChannelState *channel = self->channel;
    uint64_t location = 0;
    if (self->ring > 0) {
        channel->turn = (channel->turn + 1) % RING_SLOTS;
        location = (uint64_t)(self->ring + channel->turn * channel->side_bytes);
    }
    char *own = (char *)channel->memory.buf +
                (location ? (Py_ssize_t)location
                          : channel->slots[channel->rank] + side * channel->side_bytes);
    if (self->leaf_count)
        put_leaves(self, own, input);
    else if (self->arithmetic.half)
        widen(self->arithmetic.half, data_of(input), (float *)own, self->input.nbytes / 2);
    else
        for (int put = 0; put < self->put_count; put++)
            copy_out(&channel->stores, own + self->puts[put].to,
                     data_of(input) + self->puts[put].from, self->puts[put].nbytes);
    return location;
}

/* -- running ----------------------------------------------------------------------------------- */

/* Wait for the other ranks of a small call, without the GIL. Afterwards other threads may have
 * changed the arrays; then Python continues. */
static AttemptState wait_small(NativeCall *self, Attempt *attempt, uint64_t check) {
    const int taken = try_acquire(self->busy);
    if (taken < 0) {
        interrupt_call(self, attempt->number, attempt->began, attempt->spec);
        return FAILED;
    }
    attempt->has_lock = taken;
    int agree;
    Py_BEGIN_ALLOW_THREADS
        agree = all_agree(self, check, PATIENCE_NS);
    Py_END_ALLOW_THREADS
    const int written = IN_ONE_PIECE | ALIGNED | WRITEABLE;
    const int is_unchanged = self->leaf_count || self->no_result != Py_None
                                 ? fit_still(self, &self->output, attempt->output, written)
                                 : fits(&self->output, attempt->output, written) &&
                                       fits(&self->input, attempt->input, IN_ONE_PIECE | ALIGNED);
    return agree && is_unchanged ? COMPLETED : PUBLISHED;
}

/* Make a call through the small slots. */
static AttemptState run_small(NativeCall *self, Attempt *attempt, long long call) {
    ChannelState *channel = self->channel;
    const int side = (int)(channel->side ^= 1);
    const uint64_t location = put_own(self, side, attempt->input);
    const uint64_t plain = attempt->fingerprint + (uint64_t)call * SPREAD,
                   check = plain + self->detail;
    publish_call(self, call, check, plain, location);
    if (!all_agree(self, check, channel->patience.shares_cores ? YIELD_NS : 0)) {
        const AttemptState state = wait_small(self, attempt, check);
        if (state != COMPLETED) return state;
    }
    finish(self, side, self->leaf_count ? NULL : data_of(attempt->input), attempt->output);
    return COMPLETED;
}

/* Return the offset of an address in shared memory, or 0. */
static uint64_t offset_of(const ChannelState *channel, const char *memory) {
    const char *start = channel->memory.buf;
    return memory >= start && memory < start + channel->memory.len ? (uint64_t)(memory - start) : 0;
}

/* Return whether the source of a rank means a copied input: it has the side and page of its cells,
 * and no offset. "The channel protocol" of docs/internals.md explains sources and targets. */
static int is_copied_input(uint64_t location) { return location < 2 || location & AT_PAGE; }

/* Find the program for the placement that all ranks have published; NULL if it is not known yet. */
static const Placement *find_placement(const NativeCall *self, uint64_t *sources,
                                       uint64_t *targets) {
    const ChannelState *channel = self->channel;
    const int side = (int)channel->side;
    uint64_t bits = 0;
    int into_all = 1, by_owners = 0;
    for (int rank = 0; rank < channel->size; rank++) {
        const Py_ssize_t entry = entry_of(channel, rank);
        sources[rank] = seen(channel->words + entry + channel->source_at + side);
        targets[rank] = seen(channel->words + entry + channel->target_at + side);
        bits |= (uint64_t)!is_copied_input(sources[rank]) << rank;
        into_all = into_all && targets[rank] != 0;
        by_owners =
            by_owners || (!is_copied_input(sources[rank]) && sources[rank] >> 1 == targets[rank]);
    }
    for (int index = 0; index < PLACEMENTS_MAX; index++) {
        const Placement *placement = &self->placements[index];
        if (placement->program != NULL && placement->sources == bits &&
            placement->into_all == into_all && placement->by_owners == by_owners)
            return placement;
    }
    return NULL;
}

/* Publish the locations of this rank's blocks; return its BlockOffer, 0 if they must go by cells.
 */
static uint64_t publish_locations(const NativeCall *self, const char *x) {
    const ChannelState *channel = self->channel;
    uint64_t here = offset_of(channel, x), offer = RESIDENT | (self->reads ? READS : 0);
    if (self->put_count == 0) return offer;
    if (here == 0) {
        if (!self->reads) return 0;
        here = (uint64_t)(uintptr_t)x | ADDRESS;
        offer = READS;
    }
    uint64_t *words = (uint64_t *)((char *)channel->memory.buf + channel->slots[channel->rank] +
                                   channel->side * channel->side_bytes);
    for (int put = 0; put < self->put_count; put++)
        words[put] = here + (uint64_t)self->puts[put].from;
    return offer | LOCATED;
}

/* Return the side of the first cells, and from bit 1 on their first page. Cells that need one side
 * only begin at another page in each call. So their lines have left the caches of other cores when
 * they are written again. This gains nothing for vectors of ranks that share cores. */
static uint64_t cells_for(const NativeCall *self) {
    ChannelState *channel = self->channel;
    const Program *program = self->placements[0].program;
    int64_t used = 0;
    for (int memory = 0; memory < program->memories; memory++) {
        const Named *named = &program->named[memory];
        if (named->kind != CELLS || named->rank != channel->rank) continue;
        used = named->place ? channel->segment_bytes : used > named->nbytes ? used : named->nbytes;
    }
    const uint64_t side = (uint64_t)(channel->tail ^ 1), pages = (uint64_t)(used + PAGE - 1) / PAGE;
    if (pages == 0 || (!self->moves_blocks && channel->patience.shares_cores)) return side;
    channel->turn = (channel->turn + 1) % RING_SLOTS;
    const uint64_t places = (uint64_t)channel->segment_bytes / PAGE / pages;
    return side | (uint64_t)(channel->turn / 2) % places * pages << 1;
}

/* The same as find_placement for blocks, which go by cells or are read directly. */
static const Placement *find_move_placement(const NativeCall *self, uint64_t *sides) {
    const ChannelState *channel = self->channel;
    uint64_t all = READS | RESIDENT, any = 0;
    for (int rank = 0; rank < channel->size; rank++) {
        const uint64_t mark = seen(channel->words + entry_of(channel, rank) + channel->target_at +
                                   (int)channel->side);
        sides[rank] = mark >> OFFER_BITS;
        all &= mark;
        any |= mark & LOCATED;
    }
    const uint64_t index = all ? 1 : 0;
    return (all || !any) && self->placements[index].sources == index &&
                   self->placements[index].program != NULL
               ? &self->placements[index]
               : NULL;
}

/* Return whether NumPy owns the memory of an array: device memory could not be read by others. */
static int is_readable(PyObject *array) {
    while (!(((Array *)array)->flags & OWNED)) {
        array = ((Array *)array)->base;
        if (array == NULL || (PyObject *)Py_TYPE(array) != array_type) return 0;
    }
    return 1;
}

/* Make a call with a long vector, without the GIL; the run then borrows its program. */
static AttemptState run_long(const NativeCall *self, const Attempt *attempt, long long call) {
    ChannelState *channel = self->channel;
    Run *run = attempt->run;
    const int arrays = self->leaf_count ? self->span_count : 1;
    const Span *const input = attempt->spans, *const output = input + arrays;
    uint64_t sources[RANKS_MAX], targets[RANKS_MAX];
    const uint64_t source = attempt->source, plain = attempt->fingerprint + (uint64_t)call * SPREAD,
                   check = plain + self->detail;
    channel->side ^= 1;
    const uint64_t offer = self->moves_blocks ? publish_locations(self, input->at) : 0;
    if (self->moves_blocks ? offer == 0 : is_copied_input(source)) {
        advance_run(run, run->program->opening);
        channel->tail = (long long)(source & 1);
    }
    if (self->group_count > self->first_small) put_own(self, (int)channel->side, attempt->input);
    if (self->moves_blocks)
        publish_call(self, call, check, plain, source << OFFER_BITS | offer);
    else
        publish_call(self, call, check, source,
                     self->leaf_count ? 0 : offset_of(channel, output->at));
    if (!all_agree(self, check, PATIENCE_NS)) return PUBLISHED;
    if (self->group_count > self->first_small)
        finish(self, (int)channel->side, NULL, attempt->output);
    const Placement *placement = self->moves_blocks ? find_move_placement(self, sources)
                                                    : find_placement(self, sources, targets);
    if (placement == NULL) return PUBLISHED;
    run->program = placement->program; /* the call owns it */
    if (!bind_vector(run, input, output, arrays, sources, targets, self->moves_blocks))
        return PUBLISHED;
    if (placement->last_side >= 0) channel->tail = (long long)(source & 1) ^ placement->last_side;
    run->place = placement->program->opening;
    return advance_run(run, placement->program->length) == END ? COMPLETED : RUN_SUSPENDED;
}

/* -- continuing in Python ---------------------------------------------------------------------- */

/* Abort the job: the exception that is set leaves a call in which other ranks take part. */
void interrupt_call(NativeCall *self, PyObject *number, PyObject *began, PyObject *spec) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done =
        PyObject_CallMethodObjArgs(self->call, name_interrupt, number, began, error, spec, NULL);
    if (done == NULL) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* Let the engine continue a published call, and its run if it is suspended. The engine serves other
 * calls meanwhile. */
static PyObject *continue_in_engine(NativeCall *self, const Attempt *attempt, int is_suspended) {
    PyObject *const number = attempt->number, *const began = attempt->began,
                    *const spec = attempt->spec;
    PyObject *request = PyObject_CallMethodObjArgs(
        self->call, name_request_of_published, number, began, attempt->input, attempt->target,
        attempt->output, spec, is_suspended ? (PyObject *)attempt->run : Py_None, (PyObject *)self,
        NULL);
    if (request == NULL) {
        interrupt_call(self, number, began, spec);
        return NULL;
    }
    PyObject *result = PyObject_CallMethodObjArgs(self->call, name_continue_in_engine, request,
                                                  began, attempt->timeout, NULL);
    Py_DECREF(request);
    return result;
}

/* -- a call ------------------------------------------------------------------------------------ */

/* Find this rank's memories of a long call. */
static int bind_own(const NativeCall *self, Attempt *attempt) {
    const ChannelState *channel = self->channel;
    const int arrays = self->leaf_count ? self->span_count : 1;
    attempt->spans = self->leaf_count
                         ? new_room(&attempt->kept_spans, 2 * arrays * (Py_ssize_t)sizeof(Span))
                         : attempt->one;
    if (attempt->spans == NULL) return 0;
    Span *const input = attempt->spans, *const output = input + arrays;
    if (self->leaf_count) {
        find_spans(self, attempt->input, input);
        find_spans(self, attempt->output, output);
    } else {
        *input = (Span){data_of(attempt->input), self->input.nbytes};
        *output = (Span){data_of(attempt->output), self->output.nbytes};
    }
    const uint64_t lies = self->leaf_count
                              ? (uint64_t)(lies_alone(self, input) || lies_alone(self, output))
                              : offset_of(channel, input->at),
                   location = self->is_everywhere || input->at != output->at ? lies : 0;
    uint64_t own[RANKS_MAX] = {0};
    if (self->moves_blocks || location == 0)
        attempt->source = cells_for(self) | (self->moves_blocks ? 0 : AT_PAGE);
    else
        attempt->source = location << 1 | (uint64_t)(channel->tail ^ 1);
    own[channel->rank] = attempt->source;
    return bind_vector(attempt->run, input, output, arrays, own, NULL, self->moves_blocks) &&
           (!self->reads || lies != 0 || is_readable(attempt->input));
}

/* Check whether C can make a call, and allocate everything it needs. Nothing that other ranks see
 * changes. */
static AttemptState set_up(NativeCall *self, Attempt *attempt) {
    const int memories = self->memories; /* may grow until the call begins: other threads run */
    const int64_t scratch_bytes = self->scratch_bytes;
    PyObject *const spec = attempt->spec;
    if (!accept(self, attempt->x, attempt->out, &attempt->input, &attempt->target))
        return FALL_BACK;
    if (attempt->target != Py_None && !do_not_overlap(self, attempt->input, attempt->target))
        return FALL_BACK;
    if (spec == Py_None) {
        attempt->info = Py_NewRef(self->info);
    } else {
        attempt->info = PyObject_CallMethodObjArgs(self->call, name_info_of, spec, NULL);
        PyObject *fingerprint = peek(attempt->info, name_fingerprint);
        if (fingerprint == NULL) return FAILED;
        attempt->fingerprint = PyLong_AsUnsignedLongLongMask(fingerprint);
    }
    attempt->output = attempt->info == NULL ? NULL : make_result(self, attempt->target);
    if (attempt->output == NULL) return FAILED;
    if (self->is_long) {
        if (is_true(self->gil_monitor, name_is_alert)) return FALL_BACK;
        PyObject *kept = PyTuple_Pack(2, attempt->input,
                                      attempt->output); /* the run may outlive this function */
        attempt->run = kept == NULL ? NULL
                                    : new_run(self->placements[0].program, self->channel, kept, 0,
                                              memories, scratch_bytes);
        Py_XDECREF(kept);
        if (attempt->run == NULL) return FAILED;
    }
    /* The code above may have run other threads, or the garbage collector. The code below does not:
     * so these checks stay valid. */
    if (!may_begin(self) || !fit_still(self, &self->input, attempt->input, IN_ONE_PIECE | ALIGNED))
        return FALL_BACK;
    if (attempt->target != Py_None &&
        !fit_still(self, &self->output, attempt->target, IN_ONE_PIECE | ALIGNED | WRITEABLE))
        return FALL_BACK;
    if (self->is_long) {
        const int taken = try_acquire(self->busy);
        if (taken < 0) return FAILED;
        attempt->has_lock = taken;
        if (taken == 0 || PyObject_Size(self->queue) || memories != self->memories ||
            scratch_bytes != self->scratch_bytes)
            return FALL_BACK;
        if (!bind_own(self, attempt)) return PyErr_Occurred() ? FAILED : FALL_BACK;
    }
    attempt->began = PyLong_FromLongLong(now_ns());
    return attempt->began == NULL ? FAILED : READY;
}

/* Make a call that has been set up. Other ranks take part in it from here on. Nothing can fail
 * before they have entered. */
static AttemptState begin_attempt(NativeCall *self, Attempt *attempt) {
    const long long call = take_number(self, &attempt->number);
    if (call < 0) return FAILED;
    if (!self->is_long) return run_small(self, attempt, call);
    Program *const first = attempt->run->program;
    AttemptState state;
    Py_BEGIN_ALLOW_THREADS
        state = run_long(self, attempt, call);
    Py_END_ALLOW_THREADS
    Py_INCREF((PyObject *)attempt->run->program);
    Py_DECREF((PyObject *)first);
    return state;
}

PyObject *run_call(PyObject *object, PyObject *x, PyObject *out, PyObject *spec,
                   PyObject *timeout) {
    NativeCall *self = (NativeCall *)object;
    Attempt attempt = {
        .x = x, .out = out, .spec = spec, .timeout = timeout, .fingerprint = self->fingerprint};
    if (self->no_result != Py_None) attempt.out = Py_None; /* this rank gets no result */
    PyObject *result = NULL;
    AttemptState state = set_up(self, &attempt);
    if (state == FAILED && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* no memory: the call has no number yet. The slow path raises the error
                          again, and informs the group */
        state = FALL_BACK;
    }
    if (state == READY) state = begin_attempt(self, &attempt);
    if (state == PUBLISHED || state == RUN_SUSPENDED)
        result = continue_in_engine(self, &attempt, state == RUN_SUSPENDED);
    if (state == COMPLETED &&
        record(self->add, attempt.info, attempt.number, attempt.began, NULL, NULL) == 0)
        result = result_of(self, attempt.output);
    if (attempt.has_lock) release(self->busy);
    if (state == FALL_BACK)
        result = PyObject_CallFunctionObjArgs(self->call, x, attempt.out, spec, timeout, NULL);
    Py_XDECREF(attempt.input);
    Py_XDECREF(attempt.target);
    Py_XDECREF(attempt.kept_spans);
    Py_XDECREF(attempt.info);
    Py_XDECREF(attempt.output);
    Py_XDECREF(attempt.number);
    Py_XDECREF(attempt.began);
    Py_XDECREF((PyObject *)attempt.run);
    return result;
}
