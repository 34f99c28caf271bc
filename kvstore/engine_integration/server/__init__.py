"""An OpenAI-compatible server over the bundled engine, and a chat page: `kvstore engine serve`. See docs/SERVER.md.

text        bytes of answers as text that comes back as the same bytes
template    a conversation as tokens: turn n's prompt and answer are a prefix of turn n+1's prompt
requests    what may be asked (pydantic), and refusals in OpenAI's form
generation  one request on the engine, from asyncio: text as it comes, stop strings, cancelling
answers     objects and chunks that are sent back
app         the endpoints (FastAPI)
page        the chat page
serving     model, cluster, agent, engine and HTTP server, started and ended together
"""
