"""One process that imports vLLM while Ray starts, and from which the engines' actors are forked.

Importing vLLM takes 10 to 20 seconds on a machine with GPUs. An actor can begin it only once Ray
has started and placed the actor. So `import_process` starts a process (`server`) that imports while
Ray starts. Ray starts an engine's actor with the program `launcher` in place of Python. The
launcher lets that process fork the actor. If that fails, the launcher executes Python itself, as
Ray would.
"""
