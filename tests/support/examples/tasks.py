import time

from spooled_supervisor import App, NonRetryableError

app = App()


@app.handler("thumbnails")
def thumbnail(ctx):
    if ctx.payload["pages"] < 1:
        raise NonRetryableError("there is nothing to show")
    for page in range(ctx.payload["pages"]):
        ctx.progress(100 * page / ctx.payload["pages"], f"page {page}")
        time.sleep(ctx.payload.get("seconds", 0))
    ctx.log("info", "rendered", pages=ctx.payload["pages"])
    return {"pages": ctx.payload["pages"]}
