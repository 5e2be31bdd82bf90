"""X11's idle time, by its screen saver extension (libXss) without a library of Python's."""

from __future__ import annotations

import ctypes
import os


class _Info(ctypes.Structure):
    """XScreenSaverInfo of X11/extensions/scrnsaver.h."""

    _fields_ = (
        ("window", ctypes.c_ulong),
        ("state", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("til_or_since", ctypes.c_ulong),
        ("idle", ctypes.c_ulong),
        ("event_mask", ctypes.c_ulong),
    )


_OnError = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OnExit = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
# A server that goes away while it is asked would have Xlib end the process. As long as the process lives it
# may call these.
_on_error = _OnError(lambda _display: 0)
_on_exit = _OnExit(lambda _display, _data: None)


def x_idle_s() -> float | None:
    """Seconds since the last input at the X server of `DISPLAY`; None without one, or if it is Wayland's."""
    if not os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return None  # XWayland sees what its own windows get, and no more
    try:
        x11, xss = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXss.so.1")
    except OSError:
        return None
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XDefaultRootWindow.restype = ctypes.c_ulong
    x11.XDefaultRootWindow.argtypes = x11.XCloseDisplay.argtypes = (ctypes.c_void_p,)
    if not hasattr(x11, "XSetIOErrorExitHandler"):
        return None  # before 1.7 nothing keeps it from ending the process
    x11.XSetIOErrorExitHandler.argtypes = (ctypes.c_void_p, _OnExit, ctypes.c_void_p)
    xss.XScreenSaverQueryInfo.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.POINTER(_Info))
    display = x11.XOpenDisplay(None)
    if not display:
        return None
    x11.XSetIOErrorHandler(_on_error)
    x11.XSetIOErrorExitHandler(display, _on_exit, None)
    try:
        info = _Info()
        known = xss.XScreenSaverQueryInfo(display, x11.XDefaultRootWindow(display), ctypes.byref(info))
        return info.idle / 1000 if known else None
    finally:
        x11.XCloseDisplay(display)
