"""The report's prose: what holds for every result."""

INTRODUCTION = """\
# What was measured

Made of the JSON files of `{folder}/` by `python bench/report.py`, nothing by hand; `--check` tells whether it still
is what they say. A figure that no file has is "not measured".
"""

TARGETS = """
## Targets

A verdict is about the figure in the file, not the rounded one that is shown. Where several files have a figure, the
newest counts and the others stand behind it. A ratio is of two figures of one file, `{claimed}` over the peer
setting that is best at this very figure: the peer may take another setting for each row, this engine may not. The
exceptions are figures all at once, for which the best of this engine's settings counts. Only files of one {device}
count.

A search for a goodput may end early and leave a bracket: the peer's goodput lies between its highest rate that served
enough and the next rate tried, which did not. A ratio is then of this engine's highest rate that served enough, over
the *upper* end of the peer's bracket: of all its settings, the highest of the lowest rates that were too fast for
each. Where both ends are within the search's tolerance, the search is closed and the lower end counts. The ratio to
the lower end is shown first. **open** says that this one alone meets the target: the bracket is too wide.
"""

LIMITS = """
## The limit that binds

For each target that is missed or open: the least time that the work can take, by arithmetic on the best rates in the
files. Operations and bytes are counted from the model's shape and the lengths of the workload. Each token goes through
the layers once; of the last layer only what is sampled is computed; decode rows ride along with prompts, so that no
weights are read for them alone. Of several rates the highest counts, so that the least time is not overstated, but of
the same card where a file tells which one it was: cards of one name differ under their power cap. Rates of matrix
products are sustained ones under that cap, those of memory come from shorter runs. All are of kernels that this engine
uses: better kernels, or another number format, would move the limit. "Proven" says that the least time is above the
target, and nothing more. Where `bench/kernels/bare_work.py` was run, its figures follow: there the same kernels ran
under the cap for seconds, so that nothing is reckoned from rates.
"""

METHOD = """
## Method

**Same requests, same arrivals.** Every system of a comparison gets the same requests: the first so many of a public
trace (prompt and output lengths) or a synthetic set, prompts of random token ids, and arrivals at random moments
(Poisson, one seed) at the rate asked for; "all at once" is every request at the start. The k-th run of each system
at a workload has the same prompts as the k-th run of every other, and other prompts than the run before, so that no
cache of prefixes helps. Outputs have the length that the trace says: the end-of-sequence token is ignored, for all.

**Same client, same metrics.** One asyncio client takes tokens as they stream, and one piece of code works out the
figures of all systems, with the names and definitions of vLLM's serving benchmark: TTFT from a request's arrival to
its first token; TPOT, by request, (end-to-end − TTFT) / (tokens − 1); ITL, every gap between two tokens of all
requests together. A request counts as met when it was served and is within *every* target. Figures at a load are
over all its completed requests; failed ones count as not met, and are told.

**Interleaved runs.** All systems of a comparison are up on the same GPU at the same time, each with its share of the
memory, and take turns: one run each at a time, while the others are idle. A file with `one_at_a_time` had one system
up after the other instead; this is told with its tables. Before a system's first run of a workload, a few short
requests go unmeasured.

**`POLICY/longest-output`** is this engine with `--prompt-order longest-output`: prompts go by their `max_tokens`, the
most first, which every system of a comparison is told of alike. It is meant for batches of which nothing is needed
before the end, and counts for figures all at once only. Since the end-of-sequence token is ignored here, `max_tokens`
is what an output has; where outputs may end sooner it is an upper bound, and the gain is less.

**Goodput** is the highest rate, in requests/s, at which the asked share of the requests meets all targets. From a
first rate, the rate is raised or lowered in growing steps until one that serves enough and one that does not are
found; the gap is halved until it is within the tolerance, or `max_runs` is reached. Each system has its own search;
with `best_peer_only`, that of a peer's setting ends when another of its settings served enough at a rate that was too
fast for this one. One run decides about each rate, so a goodput is exact to the tolerance at best.

**The peer** is vLLM's asynchronous engine in the client's process, as its own API server drives it: torch.compile
and CUDA graphs on, asynchronous scheduling on, prefix caching, statistics and (de)tokenizing off. "chunk N" is the
most tokens of one of its steps, its main setting between throughput and steady gaps; changed while it runs. Each is
a setting of its own, and claims are against the best. Every argument it was started with is in its file and below.

**Energy and clocks** are NVML's counter and samples of the whole GPU during a run; joules a token are over prompt
and output tokens.
"""

WORSE = """
## What is worse than the peer

Every figure that `{claimed}` (or, where a file has no such run, each of this engine's settings) and a peer have at
the same load in the same file, against the best peer setting *for that figure*, and the figures at each one's own
goodput, against the peer setting with the highest. Medians over repeated runs; no threshold: what is worse by a
thousandth is here.
"""

PITFALLS = """
## Pitfalls

- **One GPU, one model at a time.** Nothing here tells of several GPUs, of other GPUs, or of models and lengths that
  are not in the tables.
- **Power cap.** Under this load the GPU runs at its power limit and clocks down; figures follow the clock, and the
  clock the temperature and the kernels. Watts and clocks stand beside each run. Short measurements on a cool card
  are faster than sustained ones.
- **Warm-up.** Compiling, capturing and tuning come before a measurement, and a few unmeasured requests; start-up
  times are not in any figure.
- **Random weights.** The models are of the right shapes with random weights: time and energy of a step depend on the
  data a little (power does, by bits that flip). Each system draws its own, from its own range, so watts, and clocks
  under a power cap, may differ for that alone. What the text says is not measured.
- **Forced lengths.** Outputs have the trace's lengths. Real ones end when the model says so; a server does not know
  when, and neither did these.
- **What goodput does not see.** With an attainment of 90 %, a tenth of the requests may be late, *by any amount*,
  and TPOT is a mean over a request that hides single long gaps. So p99 of TTFT and of ITL stand beside each goodput.
- **Goodput to goodput is not the same load.** Latencies at two systems' goodputs are of different rates; a higher
  goodput may come with later requests. The tables have every run with its rate.
- **Memory is shared in interleaved runs**: each system's KV cache is smaller than on a GPU of its own.
- **A commit "with changes"** was measured from a tree that differed from it.
"""

NOT_MEASURED = """
## Not measured
"""

REPRODUCE = """
## Measuring it again

Each file by one command, from the repository's root; take another name to keep the old one. An interrupted
comparison goes on with the same command.
"""
