/* Copying bytes between the caches of cores. */
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SLOW_NS_PER_KIB                                                                            \
    200 /* of ordinary stores: 20 to 140 where cores share a cache, 300 to 600 where they do not   \
           (measured) */
#define SLOW_NS_MOST 600   /* the same, at most: what takes longer has been interrupted */
#define PASSING_LEAST 1024 /* bytes */
#define TIMED                                                                                      \
    12 /* copies are timed, one after the other: in a call some go where nobody has read, and some \
          are interrupted */
#define UNTIMED 200 /* copies by ordinary stores before these */
#define PASSING_FOR                                                                                \
    3000 /* copies past the caches, before ordinary stores are tried again: what runs the cores    \
            may move them any time */
#define TRIED                                                                                      \
    36 /* ordinary copies before these are timed: what has gone past the caches has to be fetched  \
          from memory first */

/* The C library takes string instructions for so much, which are slower here by a tenth, and by
 * half where the cores are far from each other (measured); the barrier keeps the compiler from
 * calling it. */
#define COPIES_BY(bytes)                                                                           \
    (char *target, const char *source, size_t nbytes) {                                            \
        typedef uint64_t Vector __attribute__((vector_size(bytes), aligned(1), may_alias));        \
        enum { VECTORS = 2 * LINE / (bytes) };                                                     \
        size_t done = 0;                                                                           \
        for (; done + 2 * LINE <= nbytes; done += 2 * LINE) {                                      \
            const Vector *from = (const Vector *)(source + done);                                  \
            Vector *to = (Vector *)(target + done), held[VECTORS];                                 \
            _Pragma("GCC unroll 8") for (int each = 0; each < VECTORS; each++) held[each] =        \
                from[each];                                                                        \
            _Pragma("GCC unroll 8") for (int each = 0; each < VECTORS; each++) to[each] =          \
                held[each];                                                                        \
            __asm__ volatile("" ::: "memory");                                                     \
        }                                                                                          \
        memcpy(target + done, source + done, nbytes - done);                                       \
    }

static void copy_by_16 COPIES_BY(16)
#if defined(__x86_64__)
    __attribute__((target("avx2"))) static void copy_by_32 COPIES_BY(32)
#endif

        void (*copy_bytes)(char *target, const char *source, size_t nbytes) = copy_by_16;

#if defined(__x86_64__)
/* Copy past the caches: the lines need not be fetched from where they have been read last. */
void copy_past(char *target, const char *source, size_t nbytes) {
    const size_t ahead = -(uintptr_t)target % LINE, head = ahead < nbytes ? ahead : nbytes;
    memcpy(target, source, head);
    size_t done = head;
    for (; done + LINE <= nbytes; done += LINE)
        for (size_t place = done; place < done + LINE; place += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(target + place),
                             _mm_loadu_si128((const __m128i *)(source + place)));
    memcpy(target + done, source + done, nbytes - done);
    _mm_sfence(); /* before anything is published */
}
#else
void copy_past(char *target, const char *source, size_t nbytes) {
    copy_bytes(target, source, nbytes);
}
#endif

int are_apart(const char *one, const char *other, size_t nbytes) {
    return one + nbytes <= other || other + nbytes <= one;
}

/* Return whether string instructions copy slowly between two places.
 *
 * The C library takes them for 2 to 700 KiB, and the system for what one process reads of another.
 * They are twice as fast as `copy_bytes` where both places lie in this core's caches; but AMD's
 * processors (Zen 3 and 4) take one byte a cycle where the target lies up to 32 bytes after the
 * source by their places in a page: 3 GB/s instead of 50 (measured). NumPy's arrays from 128 KiB on
 * begin 16 bytes into a page, cells of the shared memory with a page, and of two arrays of whole
 * pages that are made one after the other the second one lies 16 bytes after the first. */
int is_slow_by_string(const char *target, const char *source) {
    const uintptr_t ahead = ((uintptr_t)target - (uintptr_t)source) % PAGE;
    return 0 < ahead && ahead < LINE;
}

/* Copy to memory that only this rank reads; the two may overlap. */
void copy_in(char *target, const char *source, size_t nbytes) {
    if (is_slow_by_string(target, source) && are_apart(target, source, nbytes))
        copy_bytes(target, source, nbytes);
    else if (target != source)
        memmove(target, source, nbytes);
}

/* Copy to memory from which another core has read, and will read again.
 *
 * An ordinary store fetches its line first. Where the cores share a cache that is quick; where they
 * do not it takes longer than all else in a call, and stores that pass the caches take a tenth of
 * it, while what they have written is read more slowly. Virtual machines do not tell which is so,
 * and it changes while they run: so ordinary stores are timed. */
void copy_out(Stores *stores, char *target, const char *source, size_t nbytes) {
    if (nbytes < PASSING_LEAST) {
        copy_bytes(target, source, nbytes);
        return;
    }
    if (!stores->has_begun) *stores = (Stores){.has_begun = 1, .left = UNTIMED};
    if (stores->left > 0) {
        (stores->passes ? copy_past : copy_bytes)(target, source, nbytes);
        stores->left--;
        if (stores->left == 0 && stores->passes)
            *stores = (Stores){.has_begun = 1, .was_slow = 1, .left = TRIED};
        return;
    }
    const int64_t begin = now_ns();
    copy_bytes(target, source, nbytes);
    const int64_t took = now_ns() - begin, most = SLOW_NS_MOST * (int64_t)nbytes / 1024;
    stores->ns += took < most ? took : most;
    stores->bytes += (int64_t)nbytes;
    stores->timed++;
    if (stores->timed < TIMED) return;
    const int is_slow = stores->ns * 1024 > SLOW_NS_PER_KIB * stores->bytes,
              passes = is_slow && stores->was_slow;
    *stores = (Stores){.has_begun = 1,
                       .was_slow = is_slow,
                       .passes = passes,
                       .left = passes    ? PASSING_FOR
                               : is_slow ? TRIED
                                         : UNTIMED};
}

/* Take the best copy that this processor has. */
void choose_copy(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) copy_bytes = copy_by_32;
#endif
}
