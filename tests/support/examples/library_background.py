from spooled_supervisor import SpooledClient, SpooledWorker

client = SpooledClient()
factor = 3
worker = SpooledWorker(client, queue_name="triples", concurrency=1, auto_start=True)
worker.process(lambda ctx: factor * ctx.payload)  # forks here, and then works in a thread of its own

try:
    job = client.jobs.create(queue_name="triples", payload=14)
    print("the program goes on; the worker is", worker.state)
    while client.jobs.get(job.id).status != "completed":
        pass
    print("result", client.jobs.get(job.id).result)
finally:
    worker.stop()
    worker.join()
