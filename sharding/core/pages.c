/* Pages of mapped files, and parts of open ones; see core.h. */
#define _GNU_SOURCE
#include "core.h"
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif
#define LOOKED_AT 4096 /* pages that are asked about at a time */

static int is_unchanged(const core_range *range) {
    struct stat now;
    return !stat(range->path, &now) && now.st_size == range->size &&
           now.st_mtim.tv_sec * 1000000000LL + now.st_mtim.tv_nsec == range->modified_ns;
}

static int has_pages(const core_range *range) {
    unsigned char is_there[LOOKED_AT];
    int64_t page = sysconf(_SC_PAGESIZE), most = LOOKED_AT * page;
    for (int64_t at = 0; at < range->nbytes; at += most) {
        int64_t nbytes = range->nbytes - at < most ? range->nbytes - at : most;
        if (mincore(range->address + at, (size_t)nbytes, is_there)) return 0;
        for (int64_t i = 0; i < (nbytes + page - 1) / page; i++)
            if (!(is_there[i] & 1)) return 0;
    }
    return 1;
}

int64_t core_bring(const core_range *ranges, int64_t n, int64_t *status) {
    int64_t bad = 0;
    for (int64_t i = 0; i < n; i++) { /* the disk is asked for all of them before the first is waited for */
        const core_range *range = ranges + i;
        status[i] = range->nbytes && !((range->flags & CORE_KEPT) && has_pages(range));
        if (status[i] && (range->flags & CORE_AHEAD))
            madvise(range->address, (size_t)range->nbytes, MADV_WILLNEED);
    }
    for (int64_t i = 0; i < n; i++) {
        const core_range *range = ranges + i;
        int is_missing = (int)status[i];
        status[i] = 0;
        if ((range->flags & CORE_CHECK) && !is_unchanged(range))
            status[i] = -1;
        else if (is_missing && madvise(range->address, (size_t)range->nbytes, MADV_POPULATE_READ))
            status[i] = errno == EINVAL ? 0 : errno; /* an older kernel: they come when they are copied */
        bad += status[i] != 0;
    }
    return bad;
}

int64_t core_read(const core_part *parts, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        int64_t done = 0;
        while (done < parts[i].nbytes) {
            ssize_t got = pread((int)parts[i].descriptor, parts[i].out + done, (size_t)(parts[i].nbytes - done),
                                (off_t)(parts[i].offset + done));
            if (got > 0)
                done += got;
            else if (got == 0 || errno != EINTR)
                return i;
        }
    }
    return n;
}
