# What `make demo` shows; run it yourself where xmem is installed: bash examples/demo.sh
show() {
  printf '\n$ xmem'
  printf ' %s' "${@@Q}"
  printf '\n'
  xmem "$@"
}

show ingest examples/cpu_training.json.gz examples/cpu_training.timeline.raw.json.gz examples/mobilenet_oom.pickle
show ingest examples/gpt_small_a100.pickle
show simulate gpt_small_a100 --gpu rtx3060
show simulate gpt_small_a100 --gpu 0.8 || echo "(exit code $?)"
show query "SELECT category, count(*) AS allocations, sum(bytes) AS bytes FROM at_peak JOIN runs USING (run_id, rank)
  WHERE name = 'gpt_small_a100' GROUP BY category ORDER BY bytes DESC"
