import os
import signal
import threading

import pytest

from posttrain.errors import Interrupted
from posttrain.run.interrupt import ECHO_S, GracefulStop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_stops(number, capsys):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "finishing the step and saving" in capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)
        stop._asked_at -= ECHO_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_it_does_nothing():
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_interrupted_says_how_to_go_on():
    error = Interrupted("stopped after step 3 of 9", where="runs/x")
    assert error.exit_code == 130
    assert "--resume" in str(error)


def test_a_request_with_nothing_left_to_stop_is_told_to_who_goes_on():
    with GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
    assert GracefulStop.unheeded()
    assert not GracefulStop.unheeded(), "once"
    with pytest.raises(Interrupted), GracefulStop():
        os.kill(os.getpid(), signal.SIGINT)
        raise Interrupted("stopped after step 3 of 9")
    assert not GracefulStop.unheeded()
