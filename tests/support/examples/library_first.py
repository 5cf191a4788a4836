from spooled_supervisor import SpooledClient, SpooledWorker

client = SpooledClient()  # SPOOLED_API_KEY, and SPOOLED_API_URL where the service is not the cloud
worker = SpooledWorker(client, queue_name="reports", concurrency=2)


@worker.process
def report(ctx):
    total = 0
    for n in range(ctx.payload["rows"]):
        ctx.signal.raise_if_aborted()
        total += n
    ctx.progress(100, "added up")
    return {"total": total}


if __name__ == "__main__":
    client.jobs.create(queue_name="reports", payload={"rows": 1000})
    worker.start()  # until Ctrl-C, SIGTERM or worker.stop()
