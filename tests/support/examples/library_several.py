from spooled_supervisor import SpooledClient, SpooledWorker, run_workers

client = SpooledClient()
mails = SpooledWorker(client, queue_name="mails", concurrency=2)
pictures = SpooledWorker(client, queue_name="pictures", concurrency=1, job_timeout=60)

mails.process(lambda ctx: f"to {ctx.payload}")
pictures.process(lambda ctx: f"of {ctx.payload}")

if __name__ == "__main__":
    run_workers(mails, pictures)
