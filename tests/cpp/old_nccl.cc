// A library that says it is NCCL 2.16.5, for the test that such a one is refused.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 21605;
  return 0;
}
