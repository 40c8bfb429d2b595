// Figures about faults in real processes: violations and leaks of random faults, how soon a loss is
// noticed, how long a call outlives its deadline, how soon the group serves again.
//
// Every wait ends at the harness's kDeadline. Not thread-safe.
#ifndef REFITD_TESTS_BENCH_FAULTS_H_
#define REFITD_TESTS_BENCH_FAULTS_H_

#include <cstdint>

#include "tests/bench/report.h"

namespace refitd::bench {

// `rounds` random kills and stops over three daemons (tests/e2e/chaos.h), each in one update that
// is followed by another. Prints violations and leaks to stderr.
void BenchChaos(Report* report, uint64_t seed, int rounds);

// Reports medians and maxima; the goals are for the maxima.
void BenchFaults(Report* report);

}  // namespace refitd::bench

#endif  // REFITD_TESTS_BENCH_FAULTS_H_
