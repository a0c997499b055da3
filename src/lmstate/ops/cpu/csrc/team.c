#define _POSIX_C_SOURCE 200112L /* sched_yield */
#include "team.h"

#include <omp.h>
#include <sched.h>
#include <stddef.h>

enum { LOOKS = 256 }; /* some microseconds of them, before another thread may have the processor */

static _Thread_local team *own;

void team_begin(team *t) { own = t; }

void team_end(void) { own = NULL; }

static void look_away(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

void team_barrier(void) {
  team *const t = own;
  if (!t) {
#pragma omp barrier
    return;
  }
  const int threads = omp_get_num_threads(), round = atomic_load_explicit(&t->round, memory_order_relaxed);
  if (threads == 1) {
    atomic_store_explicit(&t->taken, 0, memory_order_relaxed);
    return;
  }
  if (atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel) + 1 == threads) {
    atomic_store_explicit(&t->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&t->taken, 0, memory_order_relaxed);
    atomic_store_explicit(&t->round, round + 1, memory_order_release);
    return;
  }
  for (int looks = 1; atomic_load_explicit(&t->round, memory_order_acquire) == round; looks = looks % LOOKS + 1)
    if (looks < LOOKS) look_away();
    else sched_yield(); /* the thread that is waited for may be waiting for this processor */
}

int64_t team_take(void) { return atomic_fetch_add_explicit(&own->taken, 1, memory_order_relaxed); }
