import asyncio

from handlers import double  # a module of yours: def double(ctx): return 2 * ctx.payload

from spooled_supervisor import SpooledClient, SpooledWorker


async def main():
    client = SpooledClient()
    worker = SpooledWorker(client, queue_name="doubles", concurrency=1)
    worker.process(double)
    worker.on("job:completed", lambda e: (print("result", e.result), worker.stop()))
    client.jobs.create(queue_name="doubles", payload=21)
    await asyncio.to_thread(worker.start)


if __name__ == "__main__":
    asyncio.run(main())
