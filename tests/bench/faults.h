// Faults in real processes, as figures: what random ones violate and leave behind, how soon a loss
// is known, how long a call outlives its deadline, how soon the group serves again.
//
// Every wait ends at the harness's kDeadline. Not thread-safe.
#ifndef REFITD_TESTS_BENCH_FAULTS_H_
#define REFITD_TESTS_BENCH_FAULTS_H_

#include <cstdint>

#include "tests/bench/report.h"

namespace refitd::bench {

// `rounds` random kills and stops over three daemons (tests/e2e/chaos.h), each in one update and
// with another one after it. What was violated or left is printed to stderr.
void BenchChaos(Report* report, uint64_t seed, int rounds);

// Medians and maxima; goals are of the maxima.
void BenchFaults(Report* report);

}  // namespace refitd::bench

#endif  // REFITD_TESTS_BENCH_FAULTS_H_
