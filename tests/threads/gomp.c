/* The part of GNU OpenMP's runtime that the native operations use, on plain POSIX threads. ThreadSanitizer sees these,
 * and nothing of libgomp, whose barriers are futexes of its own: linked with this, parallel regions can be checked. */

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct {
  void (*run)(void *);
  void *data;
  unsigned size;
  pthread_barrier_t barrier;
  pthread_mutex_t lock;
  long singles, loops; /* so many constructs of the region were begun */
  long next, end, step, chunk;
} team;

typedef struct {
  team *team;
  unsigned id;
  long singles, loops; /* so many constructs of the region this thread has come to */
} member;

static _Thread_local member me;
static pthread_mutex_t critical = PTHREAD_MUTEX_INITIALIZER;

static void *work(void *as) {
  me = *(member *)as;
  me.team->run(me.team->data);
  return NULL;
}

void GOMP_parallel(void (*run)(void *), void *data, unsigned size, unsigned flags) {
  (void)flags;
  const member before = me;
  team t = {.run = run, .data = data, .size = size ? size : 1};
  member members[t.size];
  pthread_t threads[t.size];
  pthread_barrier_init(&t.barrier, NULL, t.size);
  pthread_mutex_init(&t.lock, NULL);
  for (unsigned i = 0; i < t.size; i++) members[i] = (member){.team = &t, .id = i};
  for (unsigned i = 1; i < t.size; i++)
    if (pthread_create(&threads[i], NULL, work, &members[i])) abort();
  work(&members[0]);
  for (unsigned i = 1; i < t.size; i++) pthread_join(threads[i], NULL);
  pthread_mutex_destroy(&t.lock);
  pthread_barrier_destroy(&t.barrier);
  me = before;
}

void GOMP_barrier(void) {
  if (me.team) pthread_barrier_wait(&me.team->barrier);
}

bool GOMP_single_start(void) {
  if (!me.team) return true;
  pthread_mutex_lock(&me.team->lock);
  const bool first = me.team->singles == me.singles++;
  if (first) me.team->singles++;
  pthread_mutex_unlock(&me.team->lock);
  return first;
}

void GOMP_critical_start(void) { pthread_mutex_lock(&critical); }
void GOMP_critical_end(void) { pthread_mutex_unlock(&critical); }

bool GOMP_loop_nonmonotonic_dynamic_next(long *begin, long *end) {
  team *t = me.team;
  pthread_mutex_lock(&t->lock);
  const long left = (t->end - t->next + t->step - 1) / t->step, taken = left < t->chunk ? left : t->chunk;
  *begin = t->next;
  *end = t->next += taken * t->step;
  pthread_mutex_unlock(&t->lock);
  return taken > 0;
}

/* Behind every loop of the operations stands a barrier (see team.h): a thread is never two ahead of another. */
bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long step, long chunk, long *first, long *last) {
  team *t = me.team;
  if (!t) abort(); /* the operations have such loops in parallel regions alone */
  pthread_mutex_lock(&t->lock);
  if (t->loops == me.loops++) {
    t->loops++;
    t->next = begin, t->end = end, t->step = step, t->chunk = chunk;
  }
  pthread_mutex_unlock(&t->lock);
  return GOMP_loop_nonmonotonic_dynamic_next(first, last);
}

void GOMP_loop_end_nowait(void) {}
void GOMP_loop_end(void) { GOMP_barrier(); }

int omp_get_num_threads(void) { return me.team ? (int)me.team->size : 1; }
int omp_get_thread_num(void) { return (int)me.id; }
