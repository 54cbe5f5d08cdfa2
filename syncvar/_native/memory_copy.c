/* Copies of bytes between the caches of cores. */
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Ordinary stores take 20 to 140 ns per KiB if the cores share a cache, and 300 to 600 if not. */
#define SLOW_NS_PER_KIB 200
#define SLOW_NS_MOST 600   /* a longer copy has been interrupted: it counts as this */
#define PASSING_LEAST 1024 /* bytes from which a copy may bypass the caches */
#define TIMED 12           /* copies of a timed series: single ones may be interrupted */
#define UNTIMED 200        /* ordinary copies between two series */
#define PASSING_FOR 3000   /* copies that bypass the caches, before ordinary ones are tried again */
#define TRIED 36           /* of those, untimed ones: lines have to come from memory first */

/* memcpy uses string instructions for such sizes. They are slower here by a tenth, and by half if
 * the cores are far from each other. The barrier keeps the compiler from calling memcpy. */
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
/* Copy with stores that bypass the caches: no line has to come from the core that read it last. */
void copy_past(char *target, const char *source, size_t nbytes) {
    const size_t ahead = -(uintptr_t)target % LINE, head = ahead < nbytes ? ahead : nbytes;
    memcpy(target, source, head);
    size_t done = head;
    for (; done + LINE <= nbytes; done += LINE)
        for (size_t place = done; place < done + LINE; place += sizeof(__m128i))
            _mm_stream_si128((__m128i *)(target + place),
                             _mm_loadu_si128((const __m128i *)(source + place)));
    memcpy(target + done, source + done, nbytes - done);
    _mm_sfence(); /* complete the stores before anything is published */
}
#else
void copy_past(char *target, const char *source, size_t nbytes) {
    copy_bytes(target, source, nbytes);
}
#endif

int are_apart(const char *one, const char *other, size_t nbytes) {
    return one + nbytes <= other || other + nbytes <= one;
}

/* Return whether string instructions copy slowly between two addresses.
 *
 * memcpy uses them for 2 to 700 KiB, and so does the kernel in process_vm_readv. They are twice as
 * fast as `copy_bytes` if source and target are in this core's caches. But AMD Zen 3 and 4 copy
 * only one byte a cycle if the page offset of the target is up to 32 bytes above that of the
 * source. This is common: NumPy arrays of 128 KiB and more begin 16 bytes into a page, and cells of
 * shared memory begin with a page. */
int is_slow_by_string(const char *target, const char *source) {
    const uintptr_t ahead = ((uintptr_t)target - (uintptr_t)source) % PAGE;
    return 0 < ahead && ahead < LINE;
}

/* Copy to memory that only this rank reads; source and target may overlap. */
void copy_in(char *target, const char *source, size_t nbytes) {
    if (is_slow_by_string(target, source) && are_apart(target, source, nbytes))
        copy_bytes(target, source, nbytes);
    else if (target != source)
        memmove(target, source, nbytes);
}

/* Copy to memory that another core has read, and will read again.
 *
 * An ordinary store fetches its line first. That is fast if the cores share a cache. If they do
 * not, it takes longer than everything else in a call. Stores that bypass the caches take a tenth
 * of it, but readers of the data are slower. Virtual machines hide the topology, and it changes
 * while they run. So this function times ordinary stores. */
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

/* Choose the fastest copy for this processor. */
void choose_copy(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) copy_bytes = copy_by_32;
#endif
}
