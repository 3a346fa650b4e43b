"""Plans compared by running them: the parts of ``python -m benchmarks.compare_plans``.

cases        models and cluster shapes that are compared
candidates   which plans of a case are run
predict      what a plan is said to take, by the search's sums and by replay
worker       what one rank does: build, check the losses, time steps, look at memory
running      the coordinator's side: forks ranks on the testbed, turns what they report into records
results      the records, as JSON
statistics   pure figures over records: errors, orders, regret
markdown     a results file as text
page         the same as one HTML page
"""
