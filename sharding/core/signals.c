/* Signals in worker processes, where the interpreter may not run for long: handlers in C, which need no lock. */
#include "core.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <execinfo.h>
#else /* others have no such functions: no frame is told */
#define backtrace(frames, count) ((void)(frames), 0)
#define backtrace_symbols_fd(frames, count, descriptor) ((void)(frames))
#endif

static volatile pid_t trainer; /* SIGTERM from there ends this process */
static volatile pid_t parent;

static void shielded(int number, siginfo_t *info, void *context) {
    (void)context;
    if (number == SIGTERM && info->si_code <= 0 && info->si_pid == trainer) {
        _exit(0);
    }
}

/* The kernel tells of the end of the thread that forked this process: it may not be that of its process. */
static void parent_thread_ended(int number, siginfo_t *info, void *context) {
    (void)number, (void)info, (void)context;
    if (getppid() != parent) {
        _exit(1);
    }
}

static int64_t handle(int number, void (*handler)(int, siginfo_t *, void *)) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    return sigaction(number, &action, NULL) ? errno : 0;
}

int64_t core_shield(const int64_t *numbers, int64_t count, int64_t from) {
    trainer = (pid_t)from;
    for (int64_t i = 0; i < count; i++) {
        int64_t error = handle((int)numbers[i], shielded);
        if (error) {
            return error;
        }
    }
    return 0;
}

void core_unshield(const int64_t *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        struct sigaction now;
        if (!sigaction((int)numbers[i], NULL, &now) && (now.sa_flags & SA_SIGINFO)
            && (now.sa_sigaction == shielded || now.sa_sigaction == parent_thread_ended)) {
            signal((int)numbers[i], SIG_DFL);
        }
    }
}

int64_t core_end_with_parent(int64_t number, int64_t from) {
    parent = (pid_t)from;
    int64_t error = handle((int)number, parent_thread_ended);
    if (error) {
        return error;
    }
    if (prctl(PR_SET_PDEATHSIG, (unsigned long)number, 0, 0, 0)) {
        return errno;
    }
    if (getppid() != parent) { /* it has ended before */
        _exit(1);
    }
    return 0;
}

static struct sigaction told_before;
static int told_to = -1;

static void tell_frames(int number, siginfo_t *info, void *context) {
    static const char title[] = "native:\n";
    void *frames[18];
    int kept = errno, count = backtrace(frames, 18);
    if (write(told_to, title, sizeof title - 1) > 0 && count > 2) {
        backtrace_symbols_fd(frames + 2, count - 2, told_to); /* without this one and the kernel's */
    }
    errno = kept;
    if (told_before.sa_flags & SA_SIGINFO) {
        told_before.sa_sigaction(number, info, context);
    } else if (told_before.sa_handler != SIG_DFL && told_before.sa_handler != SIG_IGN) {
        told_before.sa_handler(number);
    }
}

int64_t core_tell_frames(int64_t number, int64_t descriptor) {
    void *frame;
    (void)backtrace(&frame, 1); /* the first call loads a library, which no handler may */
    if (descriptor < 0) {
        return 0;
    }
    told_to = (int)descriptor;
    return sigaction((int)number, NULL, &told_before) ? errno : handle((int)number, tell_frames);
}
