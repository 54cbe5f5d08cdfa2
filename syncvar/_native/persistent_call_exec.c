/* Runs persistent calls in shared memory: write, publish, wait, compare, combine.
 *
 * It does the same as syncvar/runtime/persistent/persistent_reduce.py, for contiguous arrays. It
 * leaves every other call to that function before it has changed anything.
 *
 * Small calls keep the GIL, because they take about a microsecond. After a short spin Python
 * continues the call.
 */
#include "persistent_call.h"

/* -- data of a call ---------------------------------------------------------------------------- */

/* One attempt to make a call. */
typedef struct {
    PyObject *x, *out, *said, *timeout;
    PyObject *brought, *goal;               /* the arrays of x and of out, or tuples of several */
    PyObject *told, *made, *number, *begin; /* CallInfo, output, call number, start time */
    Span one[2], *spans;                    /* memory of the inputs, then of the outputs */
    PyObject *kept_spans;
    Run *run;                /* run of a long vector */
    int has_lock;            /* it has the lock of the group's calls */
    uint64_t digest, source; /* published: the call, and the location of the cells or the input */
} Attempt;

/* State of an attempt. */
typedef enum {
    COMPLETED,     /* the result is ready; also: set up, may be published */
    FALL_BACK,     /* nothing has been changed: Python has to make the call */
    PUBLISHED,     /* phase 0 is published: Python has to continue */
    RUN_SUSPENDED, /* the run has to wait: Python has to continue it */
    FAILED,        /* an exception is set */
} Result;

static char *data_of(PyObject *array) { return ((Array *)array)->data; }

/* Return whether the output may be written while parts of the input are still to be read. */
static int lie_apart(const SlotCall *self, PyObject *x, PyObject *out) {
    if (self->leaf_count) return !self->is_long || lie_leaves_apart(self, x, out);
    const char *brought = ((Array *)x)->data, *made = ((Array *)out)->data;
    if (self->is_long && !self->tells && brought == made) return 1;
    return brought + self->brought.nbytes <= made || made + self->made.nbytes <= brought ||
           (x == out && self->term_count == 0 && !self->parts) || are_all_put(self);
}

/* Return the slot that a rank has published on a side. */
static const char *slot_of(const SlotCall *self, int rank, int side) {
    const ChannelState *channel = self->channel;
    const char *memory = channel->memory.buf;
    if (self->ring >= 0) {
        const uint64_t told =
            seen(channel->words + entry_of(channel, rank) + channel->target_at + side);
        if (told && told <= (uint64_t)channel->memory.len &&
            is_within((Py_ssize_t)told, in_slots(self, &self->made), channel->memory.len))
            return memory + told;
    }
    return memory + channel->slots[rank] + side * channel->side_bytes;
}

static const char *place_in(const SlotCall *self, const Copy *copy, int side, const char *brought) {
    return (copy->rank < 0 ? brought : slot_of(self, copy->rank, side)) + copy->from;
}

/* Return whether the input may be read instead of this rank's slot: it has the same bytes, and the
 * output does not overwrite bytes that are still to be read. */
static int reads_brought(const SlotCall *self, const char *brought, const char *out) {
    const Py_ssize_t nbytes = self->made.nbytes;
    return self->ring >= 0 && !self->how.half && brought != NULL &&
           (brought == out || brought + nbytes <= out || out + nbytes <= brought);
}

/* Combine the terms into the result, or apply the combination to it. */
static void combine_terms(const SlotCall *self, int side, const char *brought, char *out) {
    const char *terms[RANKS_MAX];
    for (int term = 0; term < self->term_count; term++)
        terms[term] =
            self->terms[term].rank == self->channel->rank && reads_brought(self, brought, out)
                ? brought
                : place_in(self, &self->terms[term], side, brought);
    fold_terms(&self->how, &self->apply, terms, self->term_count, out,
               in_slots(self, &self->made) / self->how.width);
}

/* Make the result of a call on which all ranks agree. */
void finish(const SlotCall *self, int side, const char *brought, PyObject *made) {
    if (self->leaf_count) {
        const char *slots[RANKS_MAX];
        for (int rank = 0; rank < self->channel->size; rank++)
            slots[rank] = slot_of(self, rank, side);
        combine_leaves(self, slots, made);
        return;
    }
    char *const out = data_of(made);
    for (int take = 0; take < self->take_count; take++)
        memmove(out + self->takes[take].to, place_in(self, &self->takes[take], side, brought),
                self->takes[take].nbytes);
    if (self->term_count) combine_terms(self, side, brought, out);
}

/* -- publishing -------------------------------------------------------------------------------- */

/* Return whether a call may begin now: the engine admits calls, nothing is queued, and no other
 * thread is in a call of the group. */
int may_begin(const SlotCall *self) {
    if (self->channel->begun != NULL && end_async_call(self->channel->begun, 0) < 0) PyErr_Clear();
    return self->channel->is_settled && PyObject_Size(self->queue) == 0 &&
           is_free(self->engine, self->busy);
}

/* Take the number of the next call; -1 with an exception. */
long long take_number(const SlotCall *self, PyObject **number) {
    *number = PyLong_FromLongLong(self->communicator->next_call);
    return *number == NULL ? -1 : self->communicator->next_call++;
}

/* Publish phase 0 of a call on the current side. */
void publish_call(const SlotCall *self, long long call, uint64_t check, uint64_t source,
                  uint64_t target) {
    ChannelState *channel = self->channel;
    const int side = (int)channel->side;
    uint64_t *entry = channel->words + channel->entry;
    if (self->tells || self->is_long) /* if only details differ, the others need the plain check */
        store(entry + channel->source_at + side, source);
    channel->last = (call << 1) + 2;
    if (channel->phase || entry[channel->done_at]) {
        store(entry + channel->done_at, (uint64_t)channel->phase);
        channel->phase = 0;
        store(entry + channel->phase_at, 0);
    }
    if (self->tells || self->ring >= 0 || self->is_long)
        store(entry + channel->target_at + side, target);
    store(entry + channel->check_at + side, check);
    store(entry, (uint64_t)channel->last | (uint64_t)side);
}

/* Wait for phase 0 of the others; return whether they have published the same check. Ranks without
 * abandoned calls use the same side. */
int all_agree(const SlotCall *self, uint64_t check, int64_t patience_ns) {
    ChannelState *channel = self->channel;
    int agree = have_come(channel, channel->last, patience_ns);
    for (int other = 0; agree && other < channel->size - 1; other++)
        agree = seen(channel->words + channel->others[other] + channel->check_at +
                     (int)channel->side) == check;
    return agree;
}

/* Copy the input into this rank's slot; return its offset if it is in the ring of slots, else 0. */
uint64_t put_own(const SlotCall *self, int side, PyObject *brought) {
    ChannelState *channel = self->channel;
    uint64_t told = 0;
    if (self->ring > 0) {
        channel->turn = (channel->turn + 1) % RING_SLOTS;
        told = (uint64_t)(self->ring + channel->turn * channel->side_bytes);
    }
    char *own =
        (char *)channel->memory.buf +
        (told ? (Py_ssize_t)told : channel->slots[channel->rank] + side * channel->side_bytes);
    if (self->leaf_count)
        put_leaves(self, own, brought);
    else if (self->how.half)
        widen(self->how.half, data_of(brought), (float *)own, self->brought.nbytes / 2);
    else
        for (int put = 0; put < self->put_count; put++)
            copy_out(&channel->stores, own + self->puts[put].to,
                     data_of(brought) + self->puts[put].from, self->puts[put].nbytes);
    return told;
}

/* -- running ----------------------------------------------------------------------------------- */

/* Make a call through the small slots. */
static Result run_small(const SlotCall *self, const Attempt *attempt, long long call) {
    ChannelState *channel = self->channel;
    const int side = (int)(channel->side ^= 1);
    const uint64_t told = put_own(self, side, attempt->brought);
    const uint64_t plain = attempt->digest + (uint64_t)call * SPREAD, check = plain + self->detail;
    publish_call(self, call, check, plain, told);
    if (!all_agree(self, check, channel->patience.shares_cores ? YIELD_NS : 0)) return PUBLISHED;
    finish(self, side, self->leaf_count ? NULL : data_of(attempt->brought), attempt->made);
    return COMPLETED;
}

/* Return the offset of an address in shared memory, or 0. */
static uint64_t offset_of(const ChannelState *channel, const char *memory) {
    const char *start = channel->memory.buf;
    return memory >= start && memory < start + channel->memory.len ? (uint64_t)(memory - start) : 0;
}

/* Return whether a published word means a copied input: it has the side and page of its cells, and
 * no offset. */
static int is_brought(uint64_t told) { return told < 2 || told & AT_PAGE; }

/* Find the program for the placement that all ranks have published; NULL if it is not known yet. */
static const Known *find_known(const SlotCall *self, uint64_t *sources, uint64_t *targets) {
    const ChannelState *channel = self->channel;
    const int side = (int)channel->side;
    uint64_t bits = 0;
    int into_all = 1, by_owners = 0;
    for (int rank = 0; rank < channel->size; rank++) {
        const Py_ssize_t entry = entry_of(channel, rank);
        sources[rank] = seen(channel->words + entry + channel->source_at + side);
        targets[rank] = seen(channel->words + entry + channel->target_at + side);
        bits |= (uint64_t)!is_brought(sources[rank]) << rank;
        into_all = into_all && targets[rank] != 0;
        by_owners =
            by_owners || (!is_brought(sources[rank]) && sources[rank] >> 1 == targets[rank]);
    }
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
        const Known *known = &self->known[pattern];
        if (known->program != NULL && known->sources == bits && known->into_all == into_all &&
            known->by_owners == by_owners)
            return known;
    }
    return NULL;
}

/* Publish the locations of this rank's blocks; return its BlockOffer, 0 if they must go by cells.
 */
static uint64_t tell_places(const SlotCall *self, const char *x) {
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
static uint64_t cells_for(const SlotCall *self) {
    ChannelState *channel = self->channel;
    const Program *program = self->known[0].program;
    int64_t used = 0;
    for (int memory = 0; memory < program->memories; memory++) {
        const Named *named = &program->named[memory];
        if (named->kind != CELLS || named->rank != channel->rank) continue;
        used = named->place ? channel->segment_bytes : used > named->nbytes ? used : named->nbytes;
    }
    const uint64_t side = (uint64_t)(channel->tail ^ 1), pages = (uint64_t)(used + PAGE - 1) / PAGE;
    if (pages == 0 || (!self->tells && channel->patience.shares_cores)) return side;
    channel->turn = (channel->turn + 1) % RING_SLOTS;
    const uint64_t places = (uint64_t)channel->segment_bytes / PAGE / pages;
    return side | (uint64_t)(channel->turn / 2) % places * pages << 1;
}

/* The same as find_known for blocks, which go by cells or are read directly. */
static const Known *find_known_move(const SlotCall *self, uint64_t *sides) {
    const ChannelState *channel = self->channel;
    uint64_t all = READS | RESIDENT, any = 0;
    for (int rank = 0; rank < channel->size; rank++) {
        const uint64_t mark = seen(channel->words + entry_of(channel, rank) + channel->target_at +
                                   (int)channel->side);
        sides[rank] = mark >> 3;
        all &= mark;
        any |= mark & LOCATED;
    }
    const uint64_t pattern = all ? 1 : 0;
    return (all || !any) && self->known[pattern].sources == pattern &&
                   self->known[pattern].program != NULL
               ? &self->known[pattern]
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
static Result run_long(const SlotCall *self, const Attempt *attempt, long long call) {
    ChannelState *channel = self->channel;
    Run *run = attempt->run;
    const int arrays = self->leaf_count ? self->span_count : 1;
    const Span *const brought = attempt->spans, *const made = brought + arrays;
    uint64_t sources[RANKS_MAX], targets[RANKS_MAX];
    const uint64_t source = attempt->source, plain = attempt->digest + (uint64_t)call * SPREAD,
                   check = plain + self->detail;
    channel->side ^= 1;
    const uint64_t offer = self->tells ? tell_places(self, brought->at) : 0;
    if (self->tells ? offer == 0 : is_brought(source)) {
        advance_run(run, run->program->opening);
        channel->tail = (long long)(source & 1);
    }
    if (self->kind_count > self->rider) put_own(self, (int)channel->side, attempt->brought);
    if (self->tells)
        publish_call(self, call, check, plain, source << 3 | offer);
    else
        publish_call(self, call, check, source,
                     self->leaf_count ? 0 : offset_of(channel, made->at));
    if (!all_agree(self, check, PATIENCE_NS)) return PUBLISHED;
    if (self->kind_count > self->rider) finish(self, (int)channel->side, NULL, attempt->made);
    const Known *known =
        self->tells ? find_known_move(self, sources) : find_known(self, sources, targets);
    if (known == NULL) return PUBLISHED;
    run->program = known->program; /* the call owns it */
    if (!bind_vector(run, brought, made, arrays, sources, targets, self->tells)) return PUBLISHED;
    if (known->last_side >= 0) channel->tail = (long long)(source & 1) ^ known->last_side;
    run->place = known->program->opening;
    return advance_run(run, known->program->length) ? RUN_SUSPENDED : COMPLETED;
}

/* -- continuing in Python ---------------------------------------------------------------------- */

/* Abort the job: the exception that is set leaves a call in which other ranks take part. */
void interrupt_call(SlotCall *self, PyObject *number, PyObject *begin, PyObject *said) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done =
        PyObject_CallFunctionObjArgs(self->interrupt, number, begin, error, said, NULL);
    if (done == NULL) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* Let Python continue a published call, and its run if it is suspended. Python waits longer, and
 * serves other calls meanwhile.
 *
 * `later` returns (True, result), or (False, generator) for the engine. An exception in it leaves a
 * call in which other ranks take part, so it aborts the job. */
static PyObject *hand_on(SlotCall *self, const Attempt *attempt, int waits) {
    PyObject *const number = attempt->number, *const begin = attempt->begin,
                    *const said = attempt->said;
    const int taken = self->is_long ? 0 : try_acquire(self->busy);
    PyObject *told =
        taken < 0
            ? NULL
            : PyObject_CallFunctionObjArgs(self->later, number, begin, attempt->brought,
                                           attempt->goal, attempt->made, said,
                                           waits ? (PyObject *)attempt->run : Py_None, self, NULL);
    PyObject *result = NULL;
    if (told == NULL)
        interrupt_call(self, number, begin, said);
    else if (PyTuple_GetItem(told, 0) == Py_True)
        result = Py_NewRef(PyTuple_GetItem(told, 1));
    else
        result = PyObject_CallFunctionObjArgs(
            self->hand_over, number, begin, PyTuple_GetItem(told, 1), said, attempt->timeout, NULL);
    Py_XDECREF(told);
    if (taken > 0) release(self->busy);
    return result;
}

/* -- a call ------------------------------------------------------------------------------------ */

/* Find this rank's memories of a long call. */
static int bind_own(const SlotCall *self, Attempt *attempt) {
    const ChannelState *channel = self->channel;
    const int arrays = self->leaf_count ? self->span_count : 1;
    attempt->spans = self->leaf_count
                         ? new_room(&attempt->kept_spans, 2 * arrays * (Py_ssize_t)sizeof(Span))
                         : attempt->one;
    if (attempt->spans == NULL) return 0;
    Span *const brought = attempt->spans, *const made = brought + arrays;
    if (self->leaf_count) {
        find_spans(self, attempt->brought, brought);
        find_spans(self, attempt->made, made);
    } else {
        *brought = (Span){data_of(attempt->brought), self->brought.nbytes};
        *made = (Span){data_of(attempt->made), self->made.nbytes};
    }
    const uint64_t lies = self->leaf_count
                              ? (uint64_t)(lies_alone(self, brought) || lies_alone(self, made))
                              : offset_of(channel, brought->at),
                   told = self->everyone || brought->at != made->at ? lies : 0;
    uint64_t own[RANKS_MAX] = {0};
    if (self->tells || told == 0)
        attempt->source = cells_for(self) | (self->tells ? 0 : AT_PAGE);
    else
        attempt->source = told << 1 | (uint64_t)(channel->tail ^ 1);
    own[channel->rank] = attempt->source;
    return bind_vector(attempt->run, brought, made, arrays, own, NULL, self->tells) &&
           (!self->reads || lies != 0 || is_readable(attempt->brought));
}

/* Check whether C can make a call, and allocate everything it needs. Nothing that other ranks see
 * changes. */
static Result set_up(SlotCall *self, Attempt *attempt) {
    const int memories = self->memories; /* may grow until the call begins: other threads run */
    const int64_t scratch_bytes = self->scratch_bytes;
    PyObject *const said = attempt->said;
    if (!accept(self, attempt->x, attempt->out, &attempt->brought, &attempt->goal))
        return FALL_BACK;
    if (attempt->goal != Py_None && !lie_apart(self, attempt->brought, attempt->goal))
        return FALL_BACK;
    if (said == Py_None) {
        attempt->told = Py_NewRef(self->told);
    } else {
        attempt->digest = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(said, 1));
        attempt->told =
            PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(self->saying, said, NULL);
    }
    attempt->made = attempt->told == NULL ? NULL : make_result(self, attempt->goal);
    if (attempt->made == NULL) return FAILED;
    if (self->is_long) {
        if (is_true(self->crowd, name_is_alert)) return FALL_BACK;
        PyObject *kept = PyTuple_Pack(2, attempt->brought,
                                      attempt->made); /* the run may outlive this function */
        attempt->run = kept == NULL ? NULL
                                    : new_run(self->known[0].program, self->channel, kept, 0,
                                              memories, scratch_bytes);
        Py_XDECREF(kept);
        if (attempt->run == NULL) return FAILED;
    }
    /* The code above may have run other threads, or the garbage collector. The code below does not:
     * so these checks stay valid. */
    if (!may_begin(self) ||
        !fit_still(self, &self->brought, attempt->brought, IN_ONE_PIECE | ALIGNED))
        return FALL_BACK;
    if (attempt->goal != Py_None &&
        !fit_still(self, &self->made, attempt->goal, IN_ONE_PIECE | ALIGNED | WRITEABLE))
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
    attempt->begin = PyLong_FromLongLong(now_ns());
    return attempt->begin == NULL ? FAILED : COMPLETED;
}

/* Make a call that has been set up. Other ranks take part in it from here on. Nothing can fail
 * before they have entered. */
static Result make_call(SlotCall *self, Attempt *attempt) {
    const long long call = take_number(self, &attempt->number);
    if (call < 0) return FAILED;
    if (!self->is_long) return run_small(self, attempt, call);
    Program *const first = attempt->run->program;
    Result state;
    Py_BEGIN_ALLOW_THREADS state = run_long(self, attempt, call);
    Py_END_ALLOW_THREADS Py_INCREF((PyObject *)attempt->run->program);
    Py_DECREF((PyObject *)first);
    return state;
}

PyObject *run_slots(PyObject *object, PyObject *x, PyObject *out, PyObject *said,
                    PyObject *timeout) {
    SlotCall *self = (SlotCall *)object;
    Attempt attempt = {
        .x = x, .out = out, .said = said, .timeout = timeout, .digest = self->digest};
    if (self->nothing != Py_None) attempt.out = Py_None; /* this rank gets no result */
    PyObject *result = NULL;
    Result state = set_up(self, &attempt);
    if (state == FAILED && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* no memory: the call has no number yet. The slow path raises the error
                          again, and informs the group */
        state = FALL_BACK;
    }
    if (state == COMPLETED) state = make_call(self, &attempt);
    if (state == PUBLISHED || state == RUN_SUSPENDED) {
        result = hand_on(self, &attempt, state == RUN_SUSPENDED);
        if (self->leaf_count && result != NULL) {
            PyObject *const arrays = result;
            result = structure_of(self, arrays);
            Py_DECREF(arrays);
        }
    }
    if (state == COMPLETED && record(self->add, attempt.told, attempt.number, attempt.begin) == 0)
        result = given_of(self, attempt.made);
    if (attempt.has_lock) release(self->busy);
    if (state == FALL_BACK)
        result = PyObject_CallFunctionObjArgs(self->plain, x, attempt.out, said, timeout, NULL);
    Py_XDECREF(attempt.brought);
    Py_XDECREF(attempt.goal);
    Py_XDECREF(attempt.kept_spans);
    Py_XDECREF(attempt.told);
    Py_XDECREF(attempt.made);
    Py_XDECREF(attempt.number);
    Py_XDECREF(attempt.begin);
    Py_XDECREF((PyObject *)attempt.run);
    return result;
}
