#include "ffi/registry.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "ffi/flights.h"

namespace xen_moe {
namespace {

// Returns whether a group of `ranks` of these devices has ranks in two processes.
bool SpansProcesses(const std::vector<DeviceKey>& devices, int ranks) {
  for (size_t i = 0; ranks > 0 && i < devices.size(); ++i) {
    if (ProcessOf(devices[i]) != ProcessOf(devices[i / ranks * ranks])) return true;
  }
  return false;
}

}  // namespace

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // never destroyed: at exit the driver may end first
  return *registry;
}

void Registry::Configure(Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  const MemoryProvider* provider = job.provider ? job.provider : job_.provider;
  Agree agree = job.agree ? std::move(job.agree) : std::move(job_.agree);
  job_ = std::move(job);
  job_.provider = provider;
  job_.agree = std::move(agree);
  configured_ = true;
}

void Registry::SetUp(JobSetup setup) {
  std::lock_guard<std::mutex> lock(mutex_);
  setup_ = std::move(setup);
}

bool Registry::KnowsJob() {
  JobSetup setup;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (configured_) return true;
    setup = setup_;
  }
  return setup.describe && setup.describe();
}

void Registry::SetProvider(const MemoryProvider* provider) {
  std::lock_guard<std::mutex> lock(mutex_);
  job_.provider = provider;
}

void Registry::SetAgree(Agree agree) {
  std::lock_guard<std::mutex> lock(mutex_);
  job_.agree = std::move(agree);
}

void Registry::ResolvePlaces(std::vector<DeviceKey>* devices) const {
  for (DeviceKey& key : *devices) {
    if (key >= 0) continue;
    const size_t place = static_cast<size_t>(-1 - key);
    if (place >= job_.devices.size()) {
      Refuse("the program was lowered for more than the " + std::to_string(job_.devices.size()) +
             " devices of this job");
    }
    key = job_.devices[place];
  }
}

std::shared_ptr<Workspace> Registry::Find(std::vector<DeviceKey> devices, int ranks, int channel, bool flights,
                                          int ranks_per_node) {
  if (ranks_per_node == 0) ranks_per_node = ranks;
  if (!KnowsJob()) Refuse("JAX has no GPUs in this process, so there is no symmetric memory");
  std::unique_lock<std::mutex> lock(mutex_);
  ResolvePlaces(&devices);
  if (SpansProcesses(devices, ranks) && (job_.provider == nullptr || !job_.agree) && setup_.start_memory) {
    const auto start_memory = setup_.start_memory;
    lock.unlock();
    start_memory();
    lock.lock();
  }
  std::weak_ptr<Workspace>& slot = workspaces_[{devices, {ranks, ranks_per_node, channel}}];
  std::shared_ptr<Workspace> found = slot.lock();
  if (!found) {
    found =
        std::shared_ptr<Workspace>(new Workspace(job_, std::move(devices), ranks, ranks_per_node, channel),
                                   [](Workspace* last) { Registry::Get().Leave(std::shared_ptr<Workspace>(last)); });
    slot = found;
    if (found->across()) kept_.push_back(found);
  }
  if (flights) return {found, found->flights()};
  return found;
}

std::vector<std::shared_ptr<Workspace>> Registry::All() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Workspace>> out;
  for (auto entry = workspaces_.begin(); entry != workspaces_.end();) {
    std::shared_ptr<Workspace> workspace = entry->second.lock();
    if (workspace) {
      out.emplace_back(workspace, workspace->flights());
      out.push_back(std::move(workspace));
    }
    entry = entry->second.expired() ? workspaces_.erase(entry) : std::next(entry);
  }
  return out;
}

void Registry::ResetAll(double seconds) {
  std::string failed;
  for (auto& workspace : All()) workspace->Interrupt(seconds);  // a GPU becomes idle when no workspace uses it
  for (auto& workspace : All()) {
    try {
      workspace->Reset(seconds);
    } catch (const MemoryError& e) {  // the remaining workspaces can still be reset
      if (failed.empty()) failed = e.message;
    }
  }
  if (!failed.empty()) throw MemoryError{false, failed};
  Flights::Get().Clear();
  std::vector<std::shared_ptr<Workspace>> failed_ones;
  {
    std::lock_guard<std::mutex> lock(leaving_mutex_);
    for (const auto& workspace : leaving_) {
      if (workspace->Failed()) failed_ones.push_back(workspace);
    }
  }
  for (const auto& workspace : failed_ones) {
    if (workspace->WaitIdle(seconds)) Forget(workspace.get());
  }
}

void Registry::Forget(const Workspace* gone) {
  std::shared_ptr<Workspace> last;  // destroyed after the lock has been released
  std::lock_guard<std::mutex> lock(leaving_mutex_);
  const auto found =
      std::find_if(leaving_.begin(), leaving_.end(), [&](const auto& workspace) { return workspace.get() == gone; });
  if (found == leaving_.end()) return;
  last = std::move(*found);
  leaving_.erase(found);
}

void Registry::Leave(std::shared_ptr<Workspace> workspace) {
  {
    std::lock_guard<std::mutex> lock(leaving_mutex_);
    leaving_.push_back(workspace);
  }
  // The caller may be a callback of the driver, which may not call the driver. So another thread waits for the GPUs.
  std::thread([this, workspace = std::move(workspace)] {
    try {
      while (!workspace->WaitIdle(1.0)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (!workspace->Failed()) Forget(workspace.get());
    } catch (const MemoryError&) {  // the process is ending, and the driver has ended before
    }
  }).detach();
}

void Registry::MarkDead(int process, bool clean) {
  const MemoryProvider* provider = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    provider = job_.provider;
  }
  if (provider != nullptr && provider->lost != nullptr) provider->lost(process);  // a thread may wait in the provider
  for (auto& workspace : All()) workspace->MarkDead(process, clean);
}

std::set<int> Registry::Gone() {
  std::set<int> gone;
  for (const auto& workspace : All()) {
    const std::set<int> left_out = workspace->LeftOut();
    gone.insert(left_out.begin(), left_out.end());
  }
  return gone;
}

std::string Registry::Failure() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : workspaces_) {
    const std::shared_ptr<Workspace> workspace = entry.second.lock();
    if (!workspace) continue;
    std::string text = workspace->Failure();
    if (!text.empty()) return text;
  }
  std::lock_guard<std::mutex> leaving_lock(leaving_mutex_);
  for (const auto& workspace : leaving_) {
    std::string text = workspace->Failure();
    if (!text.empty()) return text;
  }
  return "";
}

void Registry::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  Flights::Get().Clear();
  kept_.clear();
  workspaces_.clear();
  std::lock_guard<std::mutex> leaving_lock(leaving_mutex_);
  leaving_.clear();
  job_ = Job{};
  configured_ = false;
}

}  // namespace xen_moe
