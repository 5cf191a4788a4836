from spooled_supervisor import SpooledClient, SpooledWorker

client = SpooledClient()
worker = SpooledWorker(client, queue_name="squares", concurrency=2)
worker.process(lambda ctx: ctx.payload**2)

unsubscribe = worker.on("job:started", lambda e: print("started", e.job_id))
worker.on("job:failed", lambda e: print("failed", e.job_id, e.error, "again" if e.will_retry else "for good"))
worker.on("stopped", lambda e: print("stopped:", e.reason))

results = []


def collect(e):
    results.append(e.result)
    if len(results) == 3:
        worker.stop()  # from a callback, another thread, a signal handler: it only asks


worker.on("job:completed", collect)
client.jobs.bulk(queue_name="squares", jobs=[{"payload": n} for n in (1, 2, 3)])
worker.start()
unsubscribe()
print(sorted(results), worker.state)
