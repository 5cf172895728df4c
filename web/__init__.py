"""A web page that runs the kernels and the decoder in a browser, compiled to WebAssembly.

build: makes the page's files. bundle: the page as one file. serve: shows them on this machine.
api.cpp, observe.cpp and measure.cpp are what the page calls; js/ is the page, plain modules.
"""
