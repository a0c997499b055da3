/* The threads of a parallel region, and a barrier for them. */
#ifndef LMSTATE_TEAM_H
#define LMSTATE_TEAM_H
#include <stdatomic.h>
#include <stdint.h>

/* Zeros before the region. */
typedef struct {
  _Alignas(64) atomic_int arrived;
  _Alignas(64) atomic_int round; /* how often all have been there */
  _Alignas(64) atomic_long taken;
} team;

/* For every thread of a region, at its beginning and at its end: between the two, `team_barrier` spins. GNU OpenMP's
 * own barrier sleeps as soon as there are more threads than processors, though all but these may be asleep, as those of
 * another Python thread that once computed are; a decode step has hundreds, and took twice as long. */
void team_begin(team *t);
void team_end(void);

/* Wait until every thread of the region is here. Outside of the two, OpenMP's barrier. */
void team_barrier(void);

/* The next of 0, 1, 2, ... that no thread of the region took since the last barrier; only between the two. */
int64_t team_take(void);

#endif
